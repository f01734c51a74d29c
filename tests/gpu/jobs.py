"""Run launch/run.py on this machine's GPUs, several runs in parallel, with generated data."""

from __future__ import annotations

import itertools
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
WARM_UP = 3  # steps that are not timed, because they allocate, compile and tune
SMALL_GB = 45  # below this peak memory, another run may start while this one saves


@dataclass(frozen=True)
class Job:
    """A run. `data` is the name of a data file that it reads.

    With `none`, the run is a benchmark, which needs no data; its overrides set the model. With
    `own`, the overrides set both model and data.
    """

    name: str
    gpus: int
    overrides: list[str]
    data: str = "sft"
    seconds: float = 0.0  # estimated time; the job is not started if less is left
    # A program to run instead of launch/run.py, without arguments. Its output is the result.
    program: str | None = None
    keeps_model: bool = False  # another job starts from the model


def digits(drawn: random.Random, count: int) -> str:
    """Return digits, each of which is one token."""
    return "".join(drawn.choices("0123456789", k=count))


def distinct(completions: list[str], **_: Any) -> list[float]:
    """Return a cheap reward that differs within a group, so that all rows contribute gradients."""
    return [len(set(text)) / 100 for text in completions]


def write_data(folder: Path) -> None:
    """Write random digits for SFT and DPO, and sums for GRPO.

    Rows for SFT and DPO are longer than any sequence. `long` is for up to 16,384 tokens.
    """
    drawn = random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"text": digits(drawn, 4200)} for _ in range(320)],
        "long": [{"text": digits(drawn, 17000)} for _ in range(48)],
        "dpo": [
            {
                key: digits(drawn, n)
                for key, n in (("prompt", 64), ("chosen", 4200), ("rejected", 4200))
            }
            for _ in range(128)
        ],
        "grpo": [],
    }
    for _ in range(960):
        a, b = drawn.randrange(100), drawn.randrange(100)
        prompt = [{"role": "user", "content": f"What is {a} plus {b}?"}]
        rows["grpo"].append({"prompt": prompt, "answer": str(a + b)})
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def start(
    job: Job,
    hardware: str,
    folder: Path,
    gpus: list[int],
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run on these GPUs, with `environment` added to that of this process."""
    fixed = [f"name={job.name}", f"run_root={folder / 'runs'}", hardware]
    fixed.append("preflight=warn")  # the previous run on this GPU may still be saving
    if job.data == "none":
        # A benchmark resumes with the missing rows, and has nothing to save when stopped.
        fixed += ["resume=auto", "runtime.stop_timeout_s=20"]
    else:
        # Saving and hashing would take 41 of 75 s for an 8B model in 16 bits.
        fixed += ["method.args.save_strategy=no", f"save_model={str(job.keeps_model).lower()}"]
        fixed += ["tracking=none", "method.args.logging_steps=1"]
        fixed += ["resume=never", "runtime.hang_timeout_s=300"]
        if job.data != "own":
            fixed += ["model.init=random", "data=jsonl", f"data.path={folder / job.data}.jsonl"]
    argv = [job.program] if job.program else ["launch/run.py", *fixed, *job.overrides]
    with (folder / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / argv[0]), *argv[1:]],
            env={**os.environ, **(environment or {}), MASK: ",".join(map(str, gpus))},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def gpus_here(num_gpus: int) -> list[int]:
    """Return the GPUs of the mask, or the first `num_gpus`. Exit for a mask of names."""
    masked = os.environ.get(MASK)
    if not masked:
        return list(range(num_gpus))
    if not re.fullmatch(r"\d+(,\d+)*", masked):
        raise SystemExit(f"{MASK}={masked}: use the numbers of GPUs, such as {MASK}=0,1.")
    return [int(gpu) for gpu in masked.split(",")]


def run(todo: list[Job], hardware: str, folder: Path, num_gpus: int, until: float) -> None:
    """Run the unfinished jobs in parallel, and start none that would end after `until`.

    `until` is in monotonic seconds. The first job is always started; if it is stopped, the next
    call resumes it. After the last step of a run with little memory, the next job starts on the
    same GPUs. So it loads libraries while the first run saves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    todo = [job for job in todo if rows_of(job, folder) is None]
    free = gpus_here(num_gpus)
    running, num_jobs, stopping = [], len(todo), False
    while todo or running:
        now = time.monotonic()
        if not stopping and now > until and any(job.data == "none" for job, *_ in running):
            stopping = True
            for _, process, *_ in running:
                process.terminate()
        for job in list(todo):
            is_first = not running and len(todo) == num_jobs
            now = time.monotonic()
            if job.gpus <= len(free) and now + (0 if is_first else job.seconds) < until:
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
            if not ended:
                continue
            running.remove(entry)
            # With exit code 4 the program has measured, but a figure misses its limit.
            if job.program and process.returncode in (0, 4):
                save_output(job, folder)
            if not job.keeps_model:  # an 8B model in fp32 occupies 33 GB
                for weights in (folder / "runs" / job.name).rglob("*.safetensors"):
                    weights.unlink()
            seconds = time.monotonic() - began
            print(f"{job.name}: exit {process.returncode}, {seconds:.0f} s", flush=True)
    for job in todo:
        print(f"{job.name}: not run, no time left", flush=True)


def save_output(job: Job, folder: Path) -> None:
    run_dir = folder / "runs" / job.name / "output"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").touch()
    result = {"status": "done", "output": (folder / f"{job.name}.log").read_text()}
    (run_dir / "result.json").write_text(json.dumps(result))


def trained(job: Job, folder: Path) -> bool:
    """Return whether the job's newest run has logged its last step and needs little memory."""
    files = sorted((folder / "runs" / job.name).glob("[0-9]*/metrics.jsonl"))
    lines = files[-1].read_text().split("\n")[:-1] if files and job.data != "none" else []
    if not lines:
        return False
    last = json.loads(lines[-1])
    return last["step"] == last["num_steps"] and last["memory_peak_gb"] < SMALL_GB


def rows_of(job: Job, folder: Path) -> list[dict[str, Any]] | None:
    """Return the metrics of the job's newest run, or None if that run is not done."""
    files = sorted((folder / "runs" / job.name).glob("[0-9]*/result.json"))
    if not files or json.loads(files[-1].read_text()).get("status") != "done":
        return None
    lines = (files[-1].parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def step_s(rows: list[dict[str, Any]]) -> float:
    """Return the median seconds of the steps after the warm-up."""
    pairs = itertools.pairwise(row["time_s"] for row in rows)
    steps = [after - before for before, after in pairs]
    return statistics.median(steps[WARM_UP - 1 :])
