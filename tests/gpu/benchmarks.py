"""Every benchmark on the GPUs of this machine, and docs/results/<hardware>.md from what they left.

    python tests/gpu/benchmarks.py measure hardware=h200 --gpus 2 --seconds 540
    python tests/gpu/benchmarks.py report hardware=h200 > docs/results/h200.md

Benchmarks of one GPU run side by side, one a GPU. What is finished is not run again, and what was stopped goes on, so that the list can
be measured in several sessions. `--only gemm,scaling` takes those whose names hold one of the words.
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
from tests.gpu.jobs import Job, run

# Name -> GPUs, overrides; within a number of GPUs the longest first.
BENCHMARKS: dict[str, tuple[int, str]] = {
    "scaling": (4, "method=bench/scaling precision.weights=bf16 method.args.models=[7b]"),
    "scaling_13b": (4, "method=bench/scaling precision.weights=bf16 method.args.models=[13b] method.args.num_gpus=[1,4]"),
    "collectives": (4, "method=bench/collectives"),
    "scaling_2": (2, "method=bench/scaling precision.weights=bf16 method.args.models=[7b]"),
    "collectives_2": (2, "method=bench/collectives"),
    "finetune_2": (2, "method=bench/finetune model=qwen3_8b"),
    "vllm": (
        1,
        "method=bench/vllm model=qwen3_4b method.args.lengths=[[1024,128],[128,1024]] method.args.num_prompts=500 method.args.rounds=2 "
        "method.args.concurrency=[1,64] method.args.settings=[{},{quantization:fp8}]",
    ),
    # All at once take longer than a session: fp32 without TF32 is 40 s a call's row at 16384, and its compiler tries twenty kernels.
    "gemm": (1, "method=bench/gemm method.args.dtypes=[fp16,bf16,fp8] method.args.ops=[matmul,linear]"),
    "gemm_fp32": (1, "method=bench/gemm method.args.dtypes=[fp32,tf32] method.args.ops=[matmul] method.args.shapes=[[8192,8192,8192]]"),
    "gemm_compiled": (
        1,
        "method=bench/gemm method.args.dtypes=[bf16] method.args.ops=[compiled] method.args.values=[normal] method.args.paddings=[0]",
    ),
    "transformer": (1, "method=bench/transformer precision.weights=bf16"),
    "transformer_eager": (1, "method=bench/transformer precision.weights=bf16 method.args.attention=eager method.args.dropout=0.1"),
    "attention": (1, "method=bench/attention"),
    "dataloader": (1, "method=bench/dataloader"),
    "batch_size": (1, "method=bench/batch_size model=qwen3_4b"),
    "precision": (1, "method=bench/precision model=qwen3_0_6b"),
    "checkpointing": (1, "method=bench/checkpointing model=qwen3_4b"),
    "matmul": (1, "method=bench/matmul method.args.dtypes=[fp16,bf16]"),
    "mlp_loop": (1, "method=bench/mlp_loop"),
    "mlp_loop_fp32": (1, "method=bench/mlp_loop precision=fp32"),
}
BESIDE = "mi350x"  # whose published figures stand beside ours


def job(name: str) -> Job:
    gpus, words = BENCHMARKS[name]
    method = words.split()[0].partition("=")[2]
    spread = [] if "topology=" in words else [f"topology.num_gpus={gpus}", *(["topology=single"] if gpus == 1 else [])]
    assert method.startswith("bench/")
    return Job(name, gpus, [*words.split(), *spread], "none")


def measure(hardware: str, gpus: int, only: list[str] | None, folder: Path, seconds: float) -> None:
    todo = sorted((job(name) for name in BENCHMARKS if not only or any(word in name for word in only)), key=lambda j: -j.gpus)
    run([j for j in todo if j.gpus <= gpus], hardware, folder.resolve(), gpus, time.monotonic() + seconds)


def report(hardware: str, folder: Path) -> str:
    """A section for each benchmark that has a result: its command, its rows, the same case's published figure of another GPU."""
    lines = [
        f"# Benchmarks on {hardware.upper()}",
        "",
        "Made by `python tests/gpu/benchmarks.py report`; commands are beside each table.",
        "",
    ]
    for name in BENCHMARKS:
        found = sorted((folder / "runs" / name).glob("*/result.json"))
        result: dict[str, Any] = json.loads(found[-1].read_text()) if found else {}
        if result.get("rows"):
            lines += section(name, hardware, result)
    return "\n".join(lines)


def section(name: str, hardware: str, result: dict[str, Any]) -> list[str]:
    command = shlex.join(["python", "launch/run.py", f"hardware={hardware}", *job(name).overrides])
    columns, rows, figure = result["columns"], result["rows"], result["figure"]
    other = [published.published(result["benchmark"], BESIDE, row, figure) for row in rows]
    shown = [column for column in columns if any(row.get(column["key"]) is not None for row in rows)]
    head = [column["title"] for column in shown] + ([f"{BESIDE} published"] if any(other) else [])
    lines = [f"## {name}", "", f"    {command}", "", f"{result['device']}.", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row, reference in zip(rows, other, strict=True):
        cells = [text(row.get(column["key"]), column["digits"]) for column in shown]
        if row.get("error"):
            at = next((i for i, column in enumerate(shown) if column["key"] == figure), len(cells) - 1)
            cells[at] = str(row["error"]).splitlines()[0][:120]
        lines.append("| " + " | ".join([*cells, *([f"{reference.value:,g}" if reference else ""] if any(other) else [])]) + " |")
    return [*lines, "", *(f"{note}  " for note in result.get("notes", [])), ""]


def text(value: object, digits: int | None) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) and digits is not None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument("hardware", help="hardware=h200")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", type=lambda given: given.split(","))
    parser.add_argument("--folder", type=Path, default=Path("benchmarks"))
    parser.add_argument("--seconds", type=float, default=3600, help="no benchmark is started after that many")
    given = parser.parse_args()
    if given.what == "report":
        print(report(given.hardware.partition("=")[2], given.folder))
    else:
        measure(given.hardware, given.gpus, given.only, given.folder, given.seconds)


if __name__ == "__main__":
    main()
