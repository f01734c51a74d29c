"""Measure what our harness costs: benchmarks beside bare loops, in turns, in one process.

    python tests/gpu/harness.py                     on a GPU, about four minutes on an H200
    python tests/gpu/harness.py --tiny --rounds 2   on a CPU: shows that it runs

bench/gemm is compared with triton.testing.do_bench, bench/transformer with a loop written here.
Prints the median milliseconds of the rounds and the ratio of ours to theirs. Exits with 4 if a
ratio is further than 1% from 1, except with --tiny, whose times are mostly noise.

Products are of zeros, with which an H200 stays below its power limit. With normal values do_bench
alone took 0.34 to 0.40 ms for 16384 x 1024 x 8192 in one process. Products are timed after a second
of their own load. Without it that one drifted from 0.306 to 0.315 ms within 200 calls (2026-11-25),
and the two measurements differ in their calls. Models wait for their host, so a run can fail in
`large` alone if others use that host.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.bench import gemm, gpt, transformer
from recipes.bench.timing import fresh, synchronize

ALLOWED = 0.01
NO_PEAKS = OmegaConf.create({"hardware": {"peak_tflops": {}}})
WARMUP_MS, TIMED_MS = 1000, 400  # of products
WARMUP, STEPS = 5, 20  # of models
# name -> (share of the rounds, timed steps). Small models wait for their host, whose speed changes
# from second to second, so they need many rounds. A round of 7b takes twenty seconds.
MODELS = {"small": (1.0, STEPS), "large": (1.0, STEPS), "7b": (0.2, 10)}


def gemm_case(shape: str, device: torch.device) -> dict[str, Any]:
    return {
        "shape": shape,
        "dtype": "bf16" if device.type == "cuda" else "fp32",
        "op": "matmul",
        "values": "zeros",
        "padding": 0,
    }


def bare_gemm(shape: str, device: torch.device, warmup_ms: float, timed_ms: float) -> float:
    """Return the milliseconds of the same call without our harness, matrices laid out as ours."""
    call = gemm.product(*map(int, shape.split()), gemm_case(shape, device), device)
    if device.type == "cuda":
        from triton.testing import do_bench  # no Triton on a CPU

        return float(do_bench(call, warmup=warmup_ms, rep=timed_ms, return_mode="median"))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def our_gemm(shape: str, device: torch.device, warmup: int, repetitions: int) -> float:
    args = gemm.GemmConfig(
        "", shapes=[[int(size) for size in shape.split()]], warmup=warmup, repetitions=repetitions
    )
    return gemm.measure_one(gemm_case(shape, device), NO_PEAKS, args, device)["ms"]


def compare_gemm(shape: str, rounds: int, device: torch.device) -> float:
    """Run both for about the same time: do_bench counts in milliseconds, ours in calls."""
    warmup_ms, timed_ms = (WARMUP_MS, TIMED_MS) if device.type == "cuda" else (1.0, 1.0)
    ms = bare_gemm(shape, device, 1.0, 1.0)
    bare = functools.partial(bare_gemm, shape, device, warmup_ms, timed_ms)
    ours = functools.partial(
        our_gemm, shape, device, math.ceil(warmup_ms / ms), math.ceil(timed_ms / ms)
    )
    return compare(f"gemm {shape}", bare, ours, rounds, device)


def bare_transformer(name: str, device: torch.device, dtype: torch.dtype, steps: int) -> float:
    size = gpt.SIZES[name]
    model = gpt.build(size, size.sequence, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens, following = gpt.random_batch(size.vocabulary, size.batch, size.sequence, device)
    began = 0.0
    for i in range(WARMUP + steps):
        if i == WARMUP:
            synchronize(device)
            began = time.perf_counter()
        model(tokens, following).backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    return (time.perf_counter() - began) / steps * 1e3


def our_transformer(name: str, device: torch.device, config: DictConfig, steps: int) -> float:
    size = gpt.SIZES[name]
    args = transformer.TransformerConfig("", models=[name], warmup=WARMUP, steps=steps)
    case = {"model": name, "num_gpus": 1, "batch": size.batch, "sequence": size.sequence}
    return transformer.measure_one(case, config, args, device)["ms"]


def compare(
    name: str,
    bare: Callable[[], float],
    ours: Callable[[], float],
    rounds: int,
    device: torch.device,
) -> float:
    """Return the ratio of ours to theirs, by the medians of the rounds.

    They take turns, and swap places every round, so that both run on an equally warm GPU.
    """
    times: dict[Callable[[], float], list[float]] = {bare: [], ours: []}
    for i in range(rounds):
        for one in (bare, ours) if i % 2 == 0 else (ours, bare):
            fresh()
            times[one].append(one())
    theirs, mine = statistics.median(times[bare]), statistics.median(times[ours])
    (least, most), (our_least, our_most) = ((min(found), max(found)) for found in times.values())
    print(
        f"{name}: bare {theirs:.4f} ms ({least:.4f} to {most:.4f}), "
        f"ours {mine:.4f} ms ({our_least:.4f} to {our_most:.4f}), "
        f"rounds {rounds}, ratio {mine / theirs:.4f}",
        flush=True,
    )
    return mine / theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.tiny:
        print("torch sees no GPU here: --tiny shows that the comparison runs.", file=sys.stderr)
        return 3
    name = "bf16" if device.type == "cuda" else "fp32"
    config = OmegaConf.create(
        {
            "precision": {"name": name, "compute": name, "weights": name},
            "hardware": {"peak_tflops": {}},
        }
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ratios = []
    for shape in (
        ["128 64 96"] if given.tiny else ["4096 4096 4096", "8192 8192 8192", "16384 1024 8192"]
    ):
        ratios.append(compare_gemm(shape, given.rounds, device))
    for model, (share, steps) in ({"tiny": (1.0, STEPS)} if given.tiny else MODELS).items():
        bare = functools.partial(bare_transformer, model, device, dtype, steps)
        ours = functools.partial(our_transformer, model, device, config, steps)
        ratios.append(
            compare(f"transformer {model}", bare, ours, max(1, round(share * given.rounds)), device)
        )
    return 4 if not given.tiny and any(abs(ratio - 1) > ALLOWED for ratio in ratios) else 0


if __name__ == "__main__":
    sys.exit(main())
