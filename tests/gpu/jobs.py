"""Runs of launch/run.py on the GPUs of this machine, several at a time on disjoint ones, with data that fetches nothing."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MASK = "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"
WARM_UP = 3  # steps that allocate, compile and tune
SMALL_GB = 45  # held by a run that saves: another may start beside it


@dataclass(frozen=True)
class Job:
    """A run: its name, the GPUs it takes, its overrides, and which of the data files it reads.

    `none`: a benchmark, which makes its own, and whose overrides say the model; `own`: a training whose overrides say model and data.
    """

    name: str
    gpus: int
    overrides: list[str]
    data: str = "sft"
    seconds: float = 0.0  # it takes about so long: not started where less is left
    program: str | None = None  # another than launch/run.py, without arguments: its output is its result
    keeps_model: bool = False  # for another to start from


def digits(drawn: random.Random, count: int) -> str:
    """One token each."""
    return "".join(drawn.choices("0123456789", k=count))


def write_data(folder: Path) -> None:
    """Rows of random digits, longer than any sequence, for SFT (`long`: up to 16,384 tokens) and DPO; short sums for GRPO."""
    drawn = random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"text": digits(drawn, 4200)} for _ in range(320)],
        "long": [{"text": digits(drawn, 17000)} for _ in range(48)],
        "dpo": [{"prompt": digits(drawn, 64), "chosen": digits(drawn, 4200), "rejected": digits(drawn, 4200)} for _ in range(128)],
        "grpo": [],
    }
    for _ in range(960):
        a, b = drawn.randrange(100), drawn.randrange(100)
        rows["grpo"].append({"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": str(a + b)})
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def start(job: Job, hardware: str, folder: Path, gpus: list[int]) -> subprocess.Popen[bytes]:
    fixed = [f"name={job.name}", f"run_root={folder / 'runs'}", hardware]
    fixed += [] if job.data in ("own", "none") else ["model.init=random"]
    fixed += ["preflight=warn"]  # the run before on this GPU may still be saving
    if job.data == "none":  # goes on with the rows that are left
        fixed += ["resume=auto", "runtime.stop_timeout_s=20"]  # nothing to save: a row is kept as soon as it is measured
    else:
        fixed += ["tracking=none", "method.args.logging_steps=1"]
        fixed += [] if job.data == "own" else ["data=jsonl", f"data.path={folder / job.data}.jsonl"]
        fixed += ["method.args.save_strategy=no", "resume=never", "runtime.hang_timeout_s=300"]
        fixed += [f"save_model={str(job.keeps_model).lower()}"]  # 41 of the 75 s of an 8B in 16 bits were its saving and hashing
    argv = [job.program] if job.program else ["launch/run.py", *fixed, *job.overrides]
    with (folder / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / argv[0]), *argv[1:]],
            env={**os.environ, MASK: ",".join(map(str, gpus))},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def gpus_here(num_gpus: int) -> list[int]:
    """Those of the mask, else the first `num_gpus`. Ends the program for a mask of names, which the launcher does not count GPUs by."""
    masked = os.environ.get(MASK)
    if not masked:
        return list(range(num_gpus))
    if not re.fullmatch(r"\d+(,\d+)*", masked):
        raise SystemExit(f"{MASK}={masked}: GPUs are given out by their numbers here. Use: {MASK}=0,1, for example.")
    return [int(gpu) for gpu in masked.split(",")]


def run(todo: list[Job], hardware: str, folder: Path, num_gpus: int, until: float) -> None:
    """Several at a time; none is started that would end after `until` (seconds, monotonic) but the first, which takes all the time there
    is, and what still runs then is stopped and goes on the next time. What is finished is not run again.

    The GPUs of a run that holds little go to the next one when its last step is logged: that one loads its libraries while the first
    saves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    todo = [job for job in todo if rows_of(job, folder) is None]
    free = gpus_here(num_gpus)
    running, many, stopping = [], len(todo), False
    while todo or running:
        if not stopping and time.monotonic() > until and any(job.data == "none" for job, *_ in running):
            stopping = True
            for _, process, *_ in running:
                process.terminate()
        for job in list(todo):
            first = not running and len(todo) == many
            if job.gpus <= len(free) and (time.monotonic() + job.seconds < until or (first and time.monotonic() < until)):
                taken, free = free[: job.gpus], free[job.gpus :]
                todo.remove(job)
                running.append((job, start(job, hardware, folder, taken), taken, time.monotonic()))
        if not running:
            break
        time.sleep(0.5)
        for entry in list(running):
            job, process, taken, began = entry
            ended = process.poll() is not None
            if taken and (ended or trained(job, folder)):
                free = sorted([*free, *taken])
                taken.clear()
            if ended:
                running.remove(entry)
                if job.program and process.returncode in (0, 4):  # 4: it measured, and something is not as it should be
                    keep_output(job, folder)
                for weights in (folder / "runs" / job.name).rglob("*.safetensors") if not job.keeps_model else ():
                    weights.unlink()  # an 8B in fp32 fills 33 GB, and nothing reads it
                print(f"{job.name}: exit {process.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    for job in todo:
        print(f"{job.name}: not run, no time left", flush=True)


def keep_output(job: Job, folder: Path) -> None:
    kept = folder / "runs" / job.name / "output"
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "metrics.jsonl").touch()
    result = {"status": "done", "output": (folder / f"{job.name}.log").read_text()}
    (kept / "result.json").write_text(json.dumps(result))


def trained(job: Job, folder: Path) -> bool:
    """Whether the newest run of it has logged its last step, and holds little."""
    found = sorted((folder / "runs" / job.name).glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in found[-1].read_text().split("\n")[:-1]] if found and job.data != "none" else []
    return bool(rows) and rows[-1]["step"] == rows[-1]["num_steps"] and rows[-1]["memory_peak_gb"] < SMALL_GB


def rows_of(job: Job, folder: Path) -> list[dict[str, Any]] | None:
    """The metrics of its newest run; None where that is not done."""
    found = sorted((folder / "runs" / job.name).glob("*/result.json"))
    if not found or json.loads(found[-1].read_text()).get("status") != "done":
        return None
    return [json.loads(line) for line in (found[-1].parent / "metrics.jsonl").read_text().splitlines()]


def step_s(rows: list[dict[str, Any]]) -> float:
    """Median of the steps after the warm-up."""
    steps = [after["time_s"] - before["time_s"] for before, after in zip(rows, rows[1:], strict=False)]
    return statistics.median(steps[WARM_UP - 1 :])
