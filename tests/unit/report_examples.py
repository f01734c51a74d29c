"""Run directories as the launcher and the ranks leave them, written through their own functions, in small."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from launch import record
from launch.execute import STATUS, write_inputs
from launch.files import rundir, sealed
from launch.plan import make_plan
from tests.conftest import composed, host_with

HOSTILE = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>&{{ 7*7 }}"


def a_run(folder: Path, *overrides: str, exit_code: int | None = 0, **result: Any) -> Path:
    """A run of `overrides` with its plan and record. `exit_code` None: it has not ended."""
    plan = make_plan(composed("hardware=cpu", *overrides), host_with(0), folder)
    rundir.make(folder)
    write_inputs(plan, [])
    kept = record.begin(plan, host_with(0), None, list(overrides), None)
    if exit_code is not None:
        status = STATUS.get(exit_code, "failed")
        if result:
            rundir.write_json(folder / "result.json", {"status": status, **result})
        kept = record.finish(kept, folder, status, exit_code, [], result)
    rundir.write_json(folder / "record.json", kept)
    return folder


def change(path: Path, **values: Any) -> None:
    """Values of a JSON file's top level."""
    rundir.write_json(path, {**(rundir.read_json(path) or {}), **values})


def log(folder: Path, *rows: dict[str, Any] | str) -> Path:
    """Lines of metrics.jsonl; a string stands as it is."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return folder


# A step of GRPO that overlaps generation and training: all but the first and the last sum to the first.
GRPO_STEP = {"step_s": 2.0, "train_s": 1.2, "generation_s": 0.0, "sync_s": 0.1, "reward_s": 0.3, "wait_s": 0.4, "server_s": 1.2}


def steps(number: int, **values: float) -> list[dict[str, Any]]:
    """Lines of a trainer: a loss that falls, and `values` in each."""
    return [
        {"step": n, "num_steps": number, "time_s": 2.0 * n, "loss": 8 / n, "tokens_per_second": 1000.0, "memory_peak_gb": 0.5, **values}
        for n in range(1, number + 1)
    ]


def a_benchmark(folder: Path, tflops: float = 1011.0, **result: Any) -> Path:
    """A gemm with a good row, one below the gate, one that failed and one that nobody has published."""
    source = "somebody, 2024-12-22"
    rows = [
        {"shape": "16384 8192 1280", "dtype": "bf16", "tflops": tflops, "published": 1104.0, "published_source": source, "ratio": 0.92},
        {"shape": "16384 1024 8192", "dtype": "bf16", "tflops": 870.0, "published": 1104.0, "published_source": source, "ratio": 0.79},
        {"shape": "8192 8192 8192", "dtype": "fp8", "tflops": None, "error": "fp8: this GPU has none"},
        {"shape": "4096 4096 4096", "dtype": "fp16", "tflops": 700.04},
    ]
    columns = [{"key": "shape", "title": "m, n, k"}, {"key": "dtype", "title": "type"}, {"key": "tflops", "title": "TFLOPS", "digits": 1}]
    gate = {"fail_below": 0.9, "below": ["16384 1024 8192 bf16: 0.79 of 1104"]}
    said = {"benchmark": "gemm", "figure": "tflops", "higher_is_better": True, "notes": ["One sentence."], "device": "some GPU"}
    a_run(folder, exit_code=4, rows=rows, columns=columns, **said, **gate, **result)
    change(folder / "result.json", status="done")  # the series came to its end; the launcher's 4 is the gate's
    return log(folder, *({"step": n, "num_steps": 4, "time_s": float(n), **row} for n, row in enumerate(rows, start=1)))


def a_pipeline(folder: Path, *phases: tuple[str, str]) -> Path:
    """`phases` are (name, method), each on the model of the last training before it; those that evaluate have an accuracy that grows."""
    names = [f"{n}_{name}" for n, (name, _) in enumerate(phases, start=1)]
    taken: list[str] = []  # the model that the last training left
    for n, (name, (_, method)) in enumerate(zip(names, phases, strict=True)):
        given = {"accuracy": 0.25 * (n + 1)} if method == "evaluate" else {"loss": 1.0}
        a_run(folder / name, f"method={method}", *taken, **given)
        if method != "evaluate":
            log(folder / name, *steps(4))
            taken = [f"model.path={folder / name / 'model'}"]
    kept = {
        "schema": 1,
        "run_id": folder.name,
        "status": "done",
        "exit_code": 0,
        "overrides": [],
        "phases": dict(zip(names, names, strict=True)),
    }
    rundir.write_json(folder / "record.json", sealed.seal(kept))
    return folder


def a_sweep(root: Path, trials: list[dict[str, Any]], **content: Any) -> Path:
    """runs/sweeps/s with a sweep.json of these trials; those that are done have a run with curves."""
    from launch.sweeps.trials import Trial

    rows = []
    for number, given in enumerate(trials):
        place = root / "runs" / "x" / f"{number}"
        if given.get("status", "done") == "done":
            log(a_run(place, *given["varied"]), *steps(3))
        rows.append(dataclasses.asdict(Trial(number, **{"status": "done", "metric": "loss", "run_dir": f"/gone/runs/x/{number}", **given})))
    folder = root / "runs" / "sweeps" / "s"
    said = {"schema": 1, "name": "s", "metric": None, "direction": "minimize", "num_trials": len(rows), "best": None}
    rundir.write_json(folder / "sweep.json", {**said, "trials": rows, **content})
    return folder
