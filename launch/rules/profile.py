"""Define rules about profile=."""

from __future__ import annotations

from launch.machine import placement
from launch.rules.rule import Rule
from launch.schema.enums import Profile, Rocprof, Vendor
from launch.schema.trainer_args import argument

# like tunings, these start processes and wait for them
MEASURED_BY_OTHERS = ("bench/vllm", "bench/collectives")


PROFILE_RULES = [
    Rule(
        "profile_of_who_waits",
        lambda c: (
            c.profile != Profile.none and (c.method.tunes or c.method.name in MEASURED_BY_OTHERS)
        ),
        lambda c: f"profile={c.profile.value}: method={c.method.name} waits for what it measures",
        lambda c: (
            "no profile="
            + ("; or the experiment that the tuning writes, with it" if c.method.tunes else "")
        ),
    ),
    Rule(
        "profile_hardware",
        lambda c: (
            (c.profile == Profile.memory and c.hardware.vendor == Vendor.none)
            or (c.profile == Profile.rocprof and c.hardware.vendor != Vendor.amd)
        ),
        lambda c: (
            f"profile={c.profile.value} on {c.hardware.name}: memory needs a GPU, rocprof an "
            "AMD GPU"
        ),
        "profile=torch",
    ),
    Rule(
        "rocprof_compute_alone",
        lambda c: (
            c.profile == Profile.rocprof
            and c.rocprof == Rocprof.compute
            and (placement.num_trainers(c) > 1 or argument(c, "save_strategy") not in (None, "no"))
        ),
        "rocprof=compute repeats the program: on one rank, and without a checkpoint to resume from",
        lambda c: (
            "topology=single"
            + " method.args.save_strategy=no and a few method.args.max_steps" * c.method.trains
            + "; or rocprof=v3"
        ),
    ),
]
