"""Rows of check.py's table about profile=."""

from __future__ import annotations

from launch import topology
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Profile, Rocprof, Vendor
from launch.trainer_args import argument

MEASURED_BY_OTHERS = ("bench/vllm", "bench/collectives")  # as a tuning, they start processes and wait for them


def _repeats(config: Config) -> bool:
    return config.profile == Profile.rocprof and config.rocprof == Rocprof.compute


PROFILE_RULES = [
    Rule(
        "profile_of_who_waits",
        lambda c: c.profile != Profile.none and (c.method.kind == "tune" or c.method.name in MEASURED_BY_OTHERS),
        lambda c: (
            f"profile={c.profile.value} with method={c.method.name}: it watches one process, which waits for the ones that are measured"
        ),
        lambda c: "no profile=" + ("; or the experiment that the tuning writes, with it" if c.method.kind == "tune" else ""),
    ),
    Rule(
        "memory_profile_without_gpu",
        lambda c: c.profile == Profile.memory and c.hardware.vendor == Vendor.none,
        lambda c: "profile=memory on a CPU: torch records the allocations of a GPU only",
        lambda c: "profile=torch for the time of each operator, and memory_peak_gb of metrics.jsonl for the process's memory",
    ),
    Rule(
        "rocprof_without_amd",
        lambda c: c.profile == Profile.rocprof and c.hardware.vendor != Vendor.amd,
        lambda c: f"profile=rocprof on {c.hardware.name}: ROCm's profilers watch AMD GPUs",
        lambda c: "profile=torch",
    ),
    Rule(
        "rocprof_compute_alone",
        lambda c: _repeats(c) and topology.num_trainers(c) > 1,
        lambda c: f"rocprof=compute on {topology.num_trainers(c)} ranks: it runs its program many times, each rank for itself",
        lambda c: "topology=single, or rocprof=v3",
    ),
    Rule(
        "rocprof_compute_saves",
        lambda c: _repeats(c) and argument(c, "save_strategy") not in (None, "no"),
        lambda c: (
            f"rocprof=compute with method.args.save_strategy={argument(c, 'save_strategy')}: its second run would resume the first one"
        ),
        lambda c: "method.args.save_strategy=no and a few method.args.max_steps",
    ),
    Rule(
        "rocprof_program_unused",
        lambda c: c.rocprof != Rocprof.v3 and c.profile != Profile.rocprof,
        lambda c: f"rocprof={c.rocprof.name} with profile={c.profile.name}: it would be ignored",
        lambda c: f"profile=rocprof rocprof={c.rocprof.name}",
    ),
]
