"""Every benchmark and tuning on the GPUs of this machine, and docs/results/<hardware>.md from what they left.

    python tests/gpu/benchmarks.py plan hardware=h200 --gpus 2 --seconds 540       in which calls, by estimates; measures nothing
    python tests/gpu/benchmarks.py measure hardware=h200 --gpus 2 --seconds 540    the first of these calls
    python tests/gpu/benchmarks.py report hardware=h200 --folder docs/results/h200 --folder benchmarks > docs/results/h200.md
                                                                                   from whatever is there; says what is missing

In order of worth; with several GPUs what needs them comes first, and benchmarks of one GPU run side by side. A call ends soon after
`--seconds`: what still runs is stopped, and every row that it has measured is kept. The next call goes on: finished benchmarks are not run
again. Their files are in `--folder`; report reads several, of each benchmark the run with the most rows, and begins with their about.md.
docs/results/h200 keeps result.json of the runs that were whole and metrics.jsonl of the others.
`--only gemm_fp16,scaling` takes the benchmarks of these names, and for a word that is none those whose names hold it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.bench import published
from tests.gpu.jobs import Job, rows_of, run

HARNESS = "tests/gpu/harness.py"
# Name -> GPUs, seconds on an H200, overrides; in order of worth. Those of transformer, and from precision down to tune_batch
# are what they took on 2026-11-25, as are those of scaling_2 and collectives_2 on H100s; tune_inductor was stopped: by its
# rows, as is tune_vllm, by two trials of another space.
# The others are reckoned from the operations. Each call prints what it took.
BENCHMARKS: dict[str, tuple[int, int, str]] = {
    "matmul": (1, 45, "method=bench/matmul method.args.dtypes=[fp16,bf16]"),
    "mlp_loop": (1, 40, "method=bench/mlp_loop"),
    "gemm": (1, 150, "method=bench/gemm method.args.dtypes=[bf16,fp8] method.args.ops=[matmul,linear]"),
    "harness": (1, 230, HARNESS),
    "transformer": (1, 70, "method=bench/transformer precision.weights=bf16"),
    "attention": (1, 300, "method=bench/attention"),
    "precision": (1, 110, "method=bench/precision model=qwen3_0_6b"),
    "checkpointing": (1, 45, "method=bench/checkpointing model=qwen3_4b"),
    "batch_size": (1, 90, "method=bench/batch_size model=qwen3_4b method.args.warmup=1 method.args.steps=3"),
    # As the published row of this shape: compiled, no checkpointing.
    "finetune_4b": (
        1,
        60,
        "method=bench/finetune model=qwen3_4b method.args.modes=[full_bf16] method.args.batch=4 method.args.sequence=4096 "
        "method.args.gradient_checkpointing=false method.args.steps=10",
    ),
    "finetune": (1, 165, "method=bench/finetune model=qwen3_8b method.args.warmup=1 method.args.steps=2"),  # a step is 10 to 14 s
    "dataloader": (1, 95, "method=bench/dataloader"),
    "vllm_served": (
        1,
        370,
        "method=bench/vllm model=qwen3_4b method.args.kinds=[served] method.args.lengths=[[1024,128],[128,1024]] "
        "method.args.concurrency=[1,64,256] method.args.rounds=2 method.args.settings=[{}]",
    ),
    "vllm_fp8": (
        1,
        150,
        "method=bench/vllm model=qwen3_4b method.args.kinds=[served] method.args.lengths=[[1024,128]] method.args.concurrency=[64] "
        "method.args.rounds=2 method.args.settings=[{quantization:fp8}]",
    ),
    "vllm_offline": (
        1,
        300,
        "method=bench/vllm model=qwen3_4b method.args.kinds=[offline] method.args.lengths=[[1024,128],[128,1024]] "
        "method.args.num_prompts=500 method.args.settings=[{}]",
    ),
    "gemm_fp16": (1, 40, "method=bench/gemm method.args.dtypes=[fp16] method.args.ops=[matmul,linear]"),
    # fp32 without TF32 is 40 s a row at 16384.
    "gemm_fp32": (1, 55, "method=bench/gemm method.args.dtypes=[fp32,tf32] method.args.ops=[matmul] method.args.shapes=[[8192,8192,8192]]"),
    "mlp_loop_fp32": (1, 25, "method=bench/mlp_loop precision=fp32"),
    "transformer_eager": (1, 80, "method=bench/transformer precision.weights=bf16 method.args.attention=eager method.args.dropout=0.1"),
    # Its compiler tries twenty kernels a shape.
    "gemm_compiled": (
        1,
        45,
        "method=bench/gemm method.args.dtypes=[bf16] method.args.ops=[compiled] method.args.values=[normal] method.args.paddings=[0] "
        "method.args.shapes=[[8192,8192,8192],[4096,4096,4096]]",
    ),
    # Tunings: a trial of a training is 30 s or more, most of it the start of its processes, and two minutes more where it compiles.
    "tune_batch": (1, 205, "method=tune/batch model=qwen3_0_6b method.args.batches=[8,32] method.args.max_length=2048"),
    "tune_inductor": (
        1,
        500,
        "method=tune/inductor model=qwen3_0_6b method.args.candidates=[default,max-autotune-no-cudagraphs,cpp-wrapper] "
        "method.args.max_length=2048 method.args.per_device_train_batch_size=4",
    ),
    "tune_vllm": (
        1,
        530,
        "method=tune/vllm model=qwen3_4b method.args.num_trials=3 method.args.lengths=[[1024,128]] method.args.num_prompts=300 "
        "method.args.space={max_num_batched_tokens:[4096],max_num_seqs:[],enable_chunked_prefill:[],gpu_memory_utilization:[],"
        "attention_backend:[],block_size:[]}",
    ),
    "collectives_2": (2, 60, "method=bench/collectives"),
    "scaling_2": (2, 90, "method=bench/scaling precision.weights=bf16 method.args.models=[7b]"),
    "tune_rccl": (2, 120, "method=tune/rccl method.args.num_trials=6"),
    "finetune_2": (2, 350, "method=bench/finetune model=qwen3_8b"),
    "scaling": (4, 300, "method=bench/scaling precision.weights=bf16 method.args.models=[7b]"),
    "scaling_13b": (4, 240, "method=bench/scaling precision.weights=bf16 method.args.models=[13b] method.args.num_gpus=[1,4]"),
    "collectives": (4, 450, "method=bench/collectives"),
}
BESIDE = "mi350x"  # whose published figures stand beside ours
NO_FIGURES = ("step", "num_steps", "time_s", "error")  # of a line of metrics.jsonl


def job(name: str) -> Job:
    gpus, seconds, words = BENCHMARKS[name]
    if words == HARNESS:
        return Job(name, gpus, [], "none", seconds, HARNESS)
    method = words.split()[0].partition("=")[2]
    spread = [] if "topology=" in words else [f"topology.num_gpus={gpus}", *(["topology=single"] if gpus == 1 else [])]
    assert method.startswith(("bench/", "tune/"))
    weights = ["model.init=random"] if any(word.startswith("model=") for word in words.split()) else []
    return Job(name, gpus, [*words.split(), *spread, *weights], "none", seconds)


def command(name: str, hardware: str) -> str:
    one = job(name)
    if one.program:
        return shlex.join(["python", one.program])
    return shlex.join(["python", "launch/run.py", f"hardware={hardware}", *one.overrides])


def todo(gpus: int, only: list[str] | None, folder: Path) -> list[Job]:
    """What is not finished and these GPUs can run, those of most GPUs first and otherwise in order of worth."""
    words = only or [""]  # which every name holds
    found = [job(name) for name in BENCHMARKS if any(name == word if word in BENCHMARKS else word in name for word in words)]
    return sorted((j for j in found if j.gpus <= gpus and rows_of(j, folder) is None), key=lambda j: -j.gpus)


def calls(jobs: list[Job], gpus: int, seconds: float) -> list[list[tuple[float, Job]]]:
    """(start, job) of each call, by the estimates, as tests/gpu/jobs.py would start them."""
    left, found = list(jobs), []
    while left:
        free, call = [0.0] * gpus, []
        for one in list(left):
            free.sort()
            start = free[one.gpus - 1]
            if start + one.seconds < seconds or not call:
                call.append((start, one))
                free[: one.gpus] = [start + one.seconds] * one.gpus
                left.remove(one)
        found.append(call)
    return found


def plan(hardware: str, gpus: int, only: list[str] | None, folder: Path, seconds: float) -> str:
    lines = [f"{hardware}: {gpus} GPU(s), {seconds:.0f} s a call; estimates, not measured"]
    for number, call in enumerate(calls(todo(gpus, only, folder), gpus, seconds), 1):
        lines.append(f"call {number}: about {max(start + one.seconds for start, one in call):.0f} s")
        for start, one in call:
            lines.append(f"  from {start:3.0f} s  {one.seconds:3.0f} s  {one.gpus} GPU(s)  {one.name:18} {command(one.name, hardware)}")
    finished = [name for name in BENCHMARKS if rows_of(job(name), folder) is not None]
    return "\n".join([*lines, *([f"finished: {', '.join(finished)}"] if finished else [])])


def measure(hardware: str, gpus: int, only: list[str] | None, folder: Path, seconds: float) -> None:
    run(todo(gpus, only, folder), f"hardware={hardware}", folder.resolve(), gpus, time.monotonic() + seconds)


def report(hardware: str, folders: list[Path]) -> str:
    """A section for each benchmark that has rows: its command, its rows beside published figures. What has none,
    or not all, is named first."""
    results = {name: found for name in BENCHMARKS if (found := best(name, folders))}
    partial = [f"{name} ({len(found['rows'])} of {found['of']} rows)" for name, found in results.items() if "of" in found]
    made = "Made by `python tests/gpu/benchmarks.py report`; commands are beside each table."
    about = [file.read_text() for folder in folders if (file := folder / "about.md").is_file()]
    told = {name for name, (_, _, what) in BENCHMARKS.items() if what == HARNESS and any(what in text for text in about)}
    missing = [name for name in BENCHMARKS if name not in results.keys() | told]
    lines = [f"# Benchmarks on {hardware.upper()}", "", made, "", *about]
    lines += [f"Not measured: {', '.join(missing)}.  "] if missing else []
    lines += [f"Stopped before their end: {', '.join(partial)}.  "] if partial else []
    for name, result in results.items():
        lines += ["", f"## {name}", "", f"    {command(name, hardware)}", ""]
        lines += section(result, hardware) if "rows" in result else ["", *(f"    {line}" for line in result["output"].splitlines()), ""]
    return "\n".join(lines)


def best(name: str, folders: list[Path]) -> dict[str, Any] | None:
    """The content of a finished run's result.json, else the rows of the one that got furthest; None where there is nothing."""
    unfinished: dict[str, Any] = {}
    for run_dir in sorted(path for folder in folders for path in (folder / "runs" / name).glob("*/")):
        file = run_dir / "result.json"
        result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if result.get("output") or (result.get("rows") and "columns" in result):
            return result
        metrics = run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().split("\n")[:-1]] if metrics.is_file() else []
        if len(rows) > len(unfinished.get("rows", [])):
            kind, _, of = job(name).overrides[0].partition("=")[2].partition("/")
            unfinished = {"benchmark" if kind == "bench" else "tuning": of, "rows": rows, "of": rows[0]["num_steps"]}
    return unfinished or None


def section(result: dict[str, Any], hardware: str) -> list[str]:
    """Its rows, beside what was published for these GPUs, the ratio, and what was for BESIDE, each where there is any; of a tuning, what
    it gained and by which overrides."""
    rows = result["rows"]
    keys = {key: isinstance(value, float) for row in rows for key, value in row.items() if key not in NO_FIGURES}
    columns = result.get("columns") or [{"key": key, "title": key, "digits": 3 if number else None} for key, number in keys.items()]
    beside = {"published": (f"{hardware} published", "g"), "ratio": ("ratio", 2), BESIDE: (f"{BESIDE} published", "g")}
    columns = [*columns, *({"key": key, "title": title, "digits": digits} for key, (title, digits) in beside.items())]
    benchmark = result.get("benchmark", "")  # nothing is published of a tuning
    figure = result.get("figure") or next((row.figure for row in published.load(benchmark).rows), "")
    if hardware != BESIDE:
        found = [published.published(benchmark, BESIDE, row, figure) for row in rows]
        rows = [{**row, BESIDE: reference.value if reference else None} for row, reference in zip(rows, found, strict=True)]
    filled = {key for row in rows for key, value in row.items() if value is not None}
    filled |= {figure} if "error" in filled else set()  # an error stands in the place of the figure
    shown = [column for column in columns if column["key"] in filled]
    lines = [f"{result['device']}.", ""] if "device" in result else []
    lines += ["| " + " | ".join(column["title"] for column in shown) + " |", "|---" * len(shown) + "|"]
    for row in rows:
        cells = [text(row.get(column["key"]), column["digits"]) for column in shown]
        if row.get("error"):
            at = next((i for i, column in enumerate(shown) if column["key"] == figure), len(cells) - 1)
            cells[at] = str(row["error"]).splitlines()[0][:120]
        lines.append("| " + " | ".join(cells) + " |")
    gained = [f"{result['gain']:.2f} times as good with `{shlex.join(result['overrides'])}`."] if result.get("overrides") else []
    return [*lines, "", *(f"{note}  " for note in [*result.get("notes", []), *gained])]


def text(value: object, digits: int | str | None) -> str:
    """`digits` after the point; "g": those of a number of at most six."""
    if value is None:
        return ""
    if digits == "g":
        return f"{value:,g}"
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) and digits is not None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "measure", "report"])
    parser.add_argument("hardware", help="hardware=h200")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", type=lambda given: given.split(","))
    parser.add_argument("--folder", type=Path, action="append")
    parser.add_argument("--seconds", type=float, default=540, help="of a call; 570 s leave 30 s to stop in")
    given = parser.parse_args()
    hardware, folders = given.hardware.partition("=")[2], given.folder or [Path("benchmarks")]
    if given.what == "report":
        print(report(hardware, folders))
    elif given.what == "plan":
        print(plan(hardware, given.gpus, given.only, folders[0], given.seconds))
    else:
        measure(hardware, given.gpus, given.only, folders[0], given.seconds)


if __name__ == "__main__":
    main()
