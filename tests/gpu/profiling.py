"""Profile a small SFT on a GPU with profile=torch and profile=memory, and check its telemetry.

    python tests/gpu/profiling.py hardware=h200 --model qwen3_0_6b --gpus 1
    python tests/gpu/profiling.py hardware=h200 --gpus 2 --only torch

With --gpus 2 or more the run is DDP, and some of its communication must be hidden. Weights and rows
are random: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import time

from tests.gpu.jobs import Job, rows_of, run

KEYS = [
    *("gpu_utilization", "gpu_memory_bandwidth_share", "gpu_memory_used_gb"),
    *("gpu_memory_fragmentation", "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz"),
    "gpu_memory_clock_mhz",
]


def jobs(model: str, gpus: int, kinds: list[str]) -> list[Job]:
    shared = f"""
        method=sft model={model} precision=bf16 topology={"ddp" if gpus > 1 else "single"}
        topology.num_gpus={gpus} method.args.max_steps=10 method.args.max_length=2048
        method.args.per_device_train_batch_size=4
    """.split()
    return [Job(f"profile-{kind}-{gpus}", gpus, [*shared, f"profile={kind}"]) for kind in kinds]


def newest(job: Job, folder: Path) -> Path:
    return sorted((folder / "runs" / job.name).glob("*/result.json"))[-1].parent


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def show_torch(directory: Path, gpus: int) -> list[str]:
    """Print the shares, and return what does not hold."""
    kernels = read(directory / "profile/kernels.json")
    modules = read(directory / "profile/fp32_modules.json")
    shares = kernels["shares"]
    times = {key: kernels[key] for key in ("time_s", "steps")}
    print(json.dumps({**times, **shares}, indent=1))
    for row in kernels["kernels"][:25]:
        print(f"{row['share']:7.2%} {row['calls']:6} {row['kind']:13} {row['name'][:140]}")
    in_fp32 = {key: modules[key] for key in ("share", "products_share")}
    print("fp32:", json.dumps({**in_fp32, "first": modules["modules"][:5]}, indent=1))
    traces = len(list((directory / "profile").glob("trace-rank*.json.gz")))
    known = min(shares[kind] for kind in ("gemm", "attention", "memory_bound"))
    communication = shares["communication_hidden"] + shares["communication_exposed"]
    total = sum(value for name, value in shares.items() if name != "communication_hidden")
    claims = {
        "the trace is of a GPU": kernels["device"] == "gpu",
        "shares add up to 1": abs(total - 1) < 1e-6,
        "products, attention and memory-bound kernels are found": known > 0,
        "fewer than 5% of the time are in kernels of unknown names": shares["other"] < 0.05,
        "the norms in fp32 are found": bool(modules["modules"]),
        "each rank left its trace": traces == gpus,
        "communication is found with several ranks": gpus == 1 or communication > 0,
    }
    return [claim for claim, holds in claims.items() if not holds]


def show_memory(directory: Path, rows: list[dict[str, Any]]) -> list[str]:
    found = read(directory / "profile/memory.json")
    print(json.dumps(found, indent=1))
    apart = abs(found["allocated_peak_gb"] / max(row["memory_peak_gb"] for row in rows) - 1)
    claims = {
        "the snapshot is there": (directory / "profile/memory.pickle").stat().st_size > 0,
        "its peak is that of metrics.jsonl, within 5%": apart < 0.05,
        "lines of Python are named": any(".py:" in row["line"] for row in found["at_peak"]),
    }
    return [claim for claim, holds in claims.items() if not holds]


def show_telemetry(directory: Path, rows: list[dict[str, Any]]) -> list[str]:
    result = read(directory / "result.json")
    for row in rows[-3:]:
        print({key: row.get(key) for key in KEYS})
    energy = ("energy_j", "energy_kwh_per_million_tokens", "tokens_per_second")
    print({key: result.get(key) for key in energy})
    missing = [f"metrics.jsonl has {key}" for key in KEYS if key not in rows[-1]]
    power = [row["gpu_power_w"] for row in rows if "gpu_power_w" in row]
    seconds = rows[-1]["time_s"]
    # The energy is that of all ranks.
    if power and not 0.5 < result.get("energy_j", 0) / (sum(power) / len(power) * seconds) < 8:
        missing.append("energy_j is near mean power times the time")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description="Profiles and telemetry of a small SFT on GPUs.")
    parser.add_argument("hardware", help="hardware=<a group of conf/hardware>")
    parser.add_argument("--model", default="qwen3_0_6b")
    parser.add_argument("--gpus", type=int, default=1)
    kinds = ["torch", "memory", "none"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="profile=")
    parser.add_argument("--folder", type=Path, default=Path("runs/profiling"))
    parser.add_argument(
        "--seconds", type=float, default=500, help="no run is started after so many"
    )
    asked = parser.parse_args()
    folder, todo = asked.folder.resolve(), jobs(asked.model, asked.gpus, asked.only)
    run(todo, asked.hardware, folder, asked.gpus, time.monotonic() + asked.seconds)
    wrong = []
    for kind, job in zip(asked.only, todo, strict=True):
        rows = rows_of(job, folder)
        print(f"\n== {job.name}")
        if rows is None:
            wrong.append(f"{job.name} is done")
            continue
        directory = newest(job, folder)
        if kind == "torch":
            wrong += show_torch(directory, asked.gpus)
        elif kind == "memory":
            wrong += show_memory(directory, rows)
        else:
            wrong += show_telemetry(directory, rows)
    print("\n" + ("\n".join(f"DOES NOT HOLD: {claim}" for claim in wrong) or "everything holds"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
