"""Run every benchmark and tuning on this machine's GPUs, and show the results as tables.

    python tests/gpu/benchmarks.py measure hardware=h200 --gpus 2 --seconds 540
                            a second call resumes
    python tests/gpu/benchmarks.py report hardware=h200 --folder docs/results/h200
                            shows the available rows, and lists missing benchmarks

Benchmarks run in order of importance. With several GPUs, those that need most GPUs run first, and
benchmarks of one GPU run in parallel. After `--seconds`, running benchmarks are stopped and their
rows are saved. The next call resumes them and skips finished ones.

`measure` writes to `--folder`. `report` reads several folders, and shows the run of each benchmark
with most rows. docs/results/h200 contains result.json of complete runs and metrics.jsonl of the
others; docs/results/h200.md sums them up. `--only gemm_fp16,scaling` selects benchmarks by name; a
word that is not a name selects all names that contain it.
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

# Name, GPUs, seconds on an H200, and overrides, in order of importance. Seconds were measured on
# 2026-11-25 for transformer and for precision to tune_batch, and on H100s for scaling_2 and
# collectives_2. Those of tune_inductor are estimated from the rows of a stopped run, those of
# tune_vllm from two trials of another space, and all others from the number of operations.
TABLE = """
matmul 1 45 method=bench/matmul method.args.dtypes=[fp16,bf16]
mlp_loop 1 40 method=bench/mlp_loop
gemm 1 150 method=bench/gemm method.args.dtypes=[bf16,fp8] method.args.ops=[matmul,linear]
transformer 1 70 method=bench/transformer precision.weights=bf16
attention 1 300 method=bench/attention
numerics 1 60 method=bench/numerics model=qwen3_0_6b
precision 1 110 method=bench/precision model=qwen3_0_6b
checkpointing 1 45 method=bench/checkpointing model=qwen3_4b
batch_size 1 90 method=bench/batch_size model=qwen3_4b method.args.warmup=1 method.args.steps=3
# Compiled and without checkpointing, like the published row of this shape.
finetune_4b 1 60 method=bench/finetune model=qwen3_4b method.args.modes=[full_bf16] \
    method.args.batch=4 method.args.sequence=4096 method.args.gradient_checkpointing=false \
    method.args.steps=10
# A step takes 10 to 14 s.
finetune 1 165 method=bench/finetune model=qwen3_8b method.args.warmup=1 method.args.steps=2
dataloader 1 95 method=bench/dataloader
vllm_served 1 370 method=bench/vllm model=qwen3_4b method.args.kinds=[served] \
    method.args.lengths=[[1024,128],[128,1024]] method.args.concurrency=[1,64,256] \
    method.args.rounds=2 method.args.settings=[{}]
vllm_fp8 1 150 method=bench/vllm model=qwen3_4b method.args.kinds=[served] \
    method.args.lengths=[[1024,128]] method.args.concurrency=[64] method.args.rounds=2 \
    method.args.settings=[{quantization:fp8}]
vllm_offline 1 300 method=bench/vllm model=qwen3_4b method.args.kinds=[offline] \
    method.args.lengths=[[1024,128],[128,1024]] method.args.num_prompts=500 \
    method.args.settings=[{}]
gemm_fp16 1 40 method=bench/gemm method.args.dtypes=[fp16] method.args.ops=[matmul,linear]
# fp32 without TF32 would take 40 s per row at 16384.
gemm_fp32 1 55 method=bench/gemm method.args.dtypes=[fp32,tf32] method.args.ops=[matmul] \
    method.args.shapes=[[8192,8192,8192]]
mlp_loop_fp32 1 25 method=bench/mlp_loop precision=fp32
transformer_eager 1 80 method=bench/transformer precision.weights=bf16 \
    method.args.attention=eager method.args.dropout=0.1
# The compiler tries twenty kernels per shape.
gemm_compiled 1 45 method=bench/gemm method.args.dtypes=[bf16] method.args.ops=[compiled] \
    method.args.values=[normal] method.args.paddings=[0] \
    method.args.shapes=[[8192,8192,8192],[4096,4096,4096]]
# A trial that trains takes at least 30 s, mostly to start its processes, and two minutes more if
# it compiles.
tune_batch 1 205 method=tune/batch model=qwen3_0_6b method.args.batches=[8,32] \
    method.args.max_length=2048
tune_inductor 1 500 method=tune/inductor model=qwen3_0_6b \
    method.args.candidates=[default,max-autotune-no-cudagraphs,cpp-wrapper] \
    method.args.max_length=2048 method.args.per_device_train_batch_size=4
tune_vllm 1 530 method=tune/vllm model=qwen3_4b method.args.num_trials=3 \
    method.args.lengths=[[1024,128]] method.args.num_prompts=300 \
    method.args.space={max_num_batched_tokens:[4096],max_num_seqs:[],enable_chunked_prefill:[],gpu_memory_utilization:[],attention_backend:[],block_size:[]}
collectives_2 2 60 method=bench/collectives
scaling_2 2 90 method=bench/scaling precision.weights=bf16 method.args.models=[7b]
tune_rccl 2 120 method=tune/rccl method.args.num_trials=6
finetune_2 2 350 method=bench/finetune model=qwen3_8b
scaling 4 300 method=bench/scaling precision.weights=bf16 method.args.models=[7b]
scaling_13b 4 240 method=bench/scaling precision.weights=bf16 method.args.models=[13b] \
    method.args.num_gpus=[1,4]
collectives 4 450 method=bench/collectives
"""
BENCHMARKS: dict[str, tuple[int, int, str]] = {
    name: (int(gpus), int(seconds), " ".join(words))
    for name, gpus, seconds, *words in (
        line.split() for line in TABLE.splitlines() if line and not line.startswith("#")
    )
}
BESIDE = "mi350x"  # its published figures are shown next to ours
NO_FIGURES = ("step", "num_steps", "time_s", "error")  # keys of metrics.jsonl that are not figures


def job(name: str) -> Job:
    gpus, seconds, words = BENCHMARKS[name]
    overrides = [*words.split(), f"topology.num_gpus={gpus}"]
    overrides += ["topology=single"] if gpus == 1 else []
    overrides += ["model.init=random"] if " model=" in words else []
    return Job(name, gpus, overrides, "none", seconds)


def command(name: str, hardware: str) -> str:
    return shlex.join(["python", "launch/run.py", f"hardware={hardware}", *job(name).overrides])


def todo(gpus: int, only: list[str] | None, folder: Path) -> list[Job]:
    """Return unfinished jobs that fit these GPUs, sorted by number of GPUs, then by importance."""
    words = only or [""]  # the empty word is in every name
    jobs = [
        job(name)
        for name in BENCHMARKS
        if any(name == word if word in BENCHMARKS else word in name for word in words)
    ]
    pending = (j for j in jobs if j.gpus <= gpus and rows_of(j, folder) is None)
    return sorted(pending, key=lambda j: -j.gpus)


def report(hardware: str, folders: list[Path]) -> str:
    """Return a page that lists missing benchmarks and has a section for each of the others.

    A section has the command, and the rows with published figures.
    """
    results = {name: result for name in BENCHMARKS if (result := best(name, folders))}
    partial = [
        f"{name} ({len(result['rows'])} of {result['of']} rows)"
        for name, result in results.items()
        if "of" in result
    ]
    made = "Made by `python tests/gpu/benchmarks.py report`. The command is above each table."
    missing = [name for name in BENCHMARKS if name not in results]
    lines = [f"# Benchmarks on {hardware.upper()}", "", made, ""]
    lines += [f"Not measured: {', '.join(missing)}.  "] if missing else []
    lines += [f"Stopped before their end: {', '.join(partial)}.  "] if partial else []
    for name, result in results.items():
        lines += ["", f"## {name}", "", f"    {command(name, hardware)}", ""]
        lines += section(result, hardware)
    return "\n".join(lines)


def best(name: str, folders: list[Path]) -> dict[str, Any] | None:
    """Return the result.json of a finished run, or the rows of the run that has most rows."""
    unfinished: dict[str, Any] = {}
    run_dirs = sorted(
        path for folder in folders for path in (folder / "runs" / name).glob("[0-9]*/")
    )
    for run_dir in run_dirs:
        file, metrics = run_dir / "result.json", run_dir / "metrics.jsonl"
        result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        if result.get("rows") and "columns" in result:
            return result
        lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
        rows = [json.loads(line) for line in lines]
        if len(rows) > len(unfinished.get("rows", [])):
            kind, _, of = job(name).overrides[0].partition("=")[2].partition("/")
            key = "benchmark" if kind == "bench" else "tuning"
            unfinished = {key: of, "rows": rows, "of": rows[0]["num_steps"]}
    return unfinished or None


def section(result: dict[str, Any], hardware: str) -> list[str]:
    """Return a table of the rows, with published figures for these GPUs and for BESIDE, if any.

    For a tuning, add the gain and its overrides.
    """
    rows = result["rows"]
    keys = {
        key: isinstance(value, float)
        for row in rows
        for key, value in row.items()
        if key not in NO_FIGURES
    }
    columns = [(c["key"], c["title"], c["digits"]) for c in result.get("columns", [])] or [
        (key, key, 3 if number else None) for key, number in keys.items()
    ]
    columns += [
        ("published", f"{hardware} published", "g"),
        ("ratio", "ratio", 2),
        (BESIDE, f"{BESIDE} published", "g"),
    ]
    benchmark = result.get("benchmark", "")  # there are no published figures for tunings
    figure = result.get("figure") or next((row.figure for row in published.load(benchmark)[0]), "")
    if hardware != BESIDE:
        references = [published.find_reference(benchmark, BESIDE, row, figure) for row in rows]
        rows = [
            {**row, BESIDE: reference.value_of(figure) if reference else None}
            for row, reference in zip(rows, references, strict=True)
        ]
    filled = {key for row in rows for key, value in row.items() if value is not None}
    filled |= {figure} if "error" in filled else set()  # its cell shows the error
    shown = [column for column in columns if column[0] in filled]
    lines = [f"{result['device']}.", ""] if "device" in result else []
    lines.append("| " + " | ".join(title for _, title, _ in shown) + " |")
    lines.append("|---" * len(shown) + "|")
    for row in rows:
        cells = [text(row.get(key), digits) for key, _, digits in shown]
        if row.get("error"):
            names = [key for key, _, _ in shown]
            at = names.index(figure) if figure in names else -1
            cells[at] = str(row["error"]).splitlines()[0][:120]
        lines.append("| " + " | ".join(cells) + " |")
    notes = list(result.get("notes", []))
    if result.get("overrides"):
        words = shlex.join(result["overrides"])
        notes.append(f"{result['gain']:.2f} times as good with `{words}`.")
    return [*lines, "", *(f"{note}  " for note in notes)]


def text(value: object, digits: int | str | None) -> str:
    """Format a value with `digits` decimals, or with at most six digits for "g"."""
    if value is None:
        return ""
    if digits is None or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,g}" if digits == "g" else f"{value:,.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("hardware", help="hardware=h200")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--folder", type=Path, action="append")
    parser.add_argument(
        "--seconds",
        type=float,
        default=540,
        help="time limit; stopping takes up to 30 s more",
    )
    options = parser.parse_args()
    hardware, folders = options.hardware.partition("=")[2], options.folder or [Path("benchmarks")]
    if options.what == "report":
        print(report(hardware, folders))
    else:
        jobs = todo(options.gpus, options.only, folders[0])
        until = time.monotonic() + options.seconds
        run(jobs, options.hardware, folders[0].resolve(), options.gpus, until)


if __name__ == "__main__":
    main()
