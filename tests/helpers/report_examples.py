"""Write small run directories, with the functions of the launcher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from launch.config.request import Request
from launch.core import json_files
from launch.execution import record
from launch.execution.execute import STATUS, write_inputs
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan
from tests.conftest import composed, host_with

HOSTILE = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>&{{ 7*7 }}"


def a_run(folder: Path, *overrides: str, exit_code: int | None = 0, **result: Any) -> Path:
    """Write a run of `overrides` with plan and record. Without `exit_code` it is unfinished."""
    config, command = composed("hardware=cpu", *overrides), Request(overrides)
    plan = make_plan(config, host_with(0), folder, request=command)
    rundir.make(folder)
    write_inputs(plan)
    content = record.begin(plan, host_with(0), None, None)
    if exit_code is not None:
        status = STATUS.get(exit_code, "failed")
        if result:
            json_files.write_json(folder / "result.json", {"status": status, **result})
        content = record.finish(content, folder, status, exit_code, [], result)
    json_files.write_json(folder / "record.json", content)
    return folder


def change(path: Path, **values: Any) -> None:
    """Set values at the top level of a JSON file."""
    json_files.write_json(path, {**(json_files.read_json(path) or {}), **values})


def log(folder: Path, *rows: dict[str, Any] | str) -> Path:
    """Append rows to metrics.jsonl, and strings unchanged."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return folder


# A GRPO step that overlaps generation and training. step_s is the sum of all parts except server_s.
GRPO_STEP = {
    "step_s": 2.0, "train_s": 1.2, "generation_s": 0.0, "sync_s": 0.1, "reward_s": 0.3,
    "wait_s": 0.4, "server_s": 1.2,
}  # fmt: skip


def steps(number: int, **values: float) -> list[dict[str, Any]]:
    """Return the metrics of a trainer, with a falling loss, and with `values` in each row."""
    return [
        {
            "step": n,
            "num_steps": number,
            "time_s": 2.0 * n,
            "loss": 8 / n,
            "tokens_per_second": 1000.0,
            "memory_peak_gb": 0.5,
            **values,
        }
        for n in range(1, number + 1)
    ]


def a_benchmark(folder: Path, tflops: float = 1011.0, **result: Any) -> Path:
    """Write a run of bench/gemm.

    Its rows are good, below the gate, failed, and without a published figure.
    """
    published = {"published": 1104.0, "published_source": "somebody, 2024-12-22"}
    bf16 = {"dtype": "bf16", **published}
    rows = [
        {"shape": "16384 8192 1280", "tflops": tflops, "ratio": 0.92, **bf16},
        {"shape": "16384 1024 8192", "tflops": 870.0, "ratio": 0.79, **bf16},
        {"shape": "8192 8192 8192", "dtype": "fp8", "error": "fp8: this GPU has none"},
        {"shape": "4096 4096 4096", "dtype": "fp16", "tflops": 700.04},
    ]
    columns = [
        {"key": "shape", "title": "m, n, k"},
        {"key": "dtype", "title": "type"},
        {"key": "tflops", "title": "TFLOPS", "digits": 1},
    ]
    gate = {"fail_below": 0.9, "below": ["16384 1024 8192 bf16: 0.79 of 1104"]}
    description = {
        "benchmark": "gemm",
        "figure": "tflops",
        "higher_is_better": True,
        "notes": ["One sentence."],
        "device": "some GPU",
    }
    a_run(folder, exit_code=4, rows=rows, columns=columns, **description, **gate, **result)
    # The benchmark ended normally. The exit code is 4 because of the gate.
    change(folder / "result.json", status="done")
    lines = enumerate(rows, start=1)
    return log(
        folder, *({"step": n, "num_steps": 4, "time_s": float(n), **row} for n, row in lines)
    )


def a_pipeline(folder: Path, *phases: tuple[str, str]) -> Path:
    """Write a pipeline of `phases` (name, method), each on the model of the previous training.

    Evaluations have a rising accuracy.
    """
    names = [f"{n}_{name}" for n, (name, _) in enumerate(phases, start=1)]
    model: list[str] = []  # override with the model of the last training
    for n, (name, (_, method)) in enumerate(zip(names, phases, strict=True)):
        result = {"accuracy": 0.25 * (n + 1)} if method == "evaluate" else {"loss": 1.0}
        a_run(folder / name, f"method={method}", *model, **result)
        if method != "evaluate":
            log(folder / name, *steps(4))
            model = [f"model.path={folder / name / 'model'}"]
    content = {
        "schema": 1,
        "run_id": folder.name,
        "status": "done",
        "exit_code": 0,
        "overrides": [],
        "phases": dict(zip(names, names, strict=True)),
    }
    json_files.write_json(folder / "record.json", sealed.seal(content))
    return folder


def a_sweep(root: Path, trials: list[dict[str, Any]], **content: Any) -> Path:
    """Write runs/sweeps/s with a sweep.json of the trials, and the runs of those that are done."""
    from launch.study.trials import Trial

    rows = []
    for number, trial in enumerate(trials):
        run_dir = root / "runs" / "x" / f"{number}"
        if trial.get("status", "done") == "done":
            log(a_run(run_dir, *trial["varied"]), *steps(3))
        defaults = {"status": "done", "metric": "loss", "run_dir": f"/gone/runs/x/{number}"}
        rows.append(dataclasses.asdict(Trial(number, **(defaults | trial))))
    folder = root / "runs" / "sweeps" / "s"
    sweep = {"schema": 1, "name": "s", "metric": None, "direction": "minimize", "best": None}
    sweep["num_trials"] = len(rows)
    json_files.write_json(folder / "sweep.json", {**sweep, "trials": rows, **content})
    return folder
