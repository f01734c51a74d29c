"""Reject images without code for a GPU, secrets in records, and wrong options of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from containers import images
from launch.inputs import engine_args
from launch.machine import masks
from launch.machine.placement import MASK, num_trainers
from launch.rules.refusal import Refusal, outside
from launch.schema import Config
from launch.schema.checked import Range
from launch.schema.enums import Profile, Rocprof, Vendor
from launch.schema.host import slurm_seconds
from launch.schema.trainer_args import argument, lock
from launch.schema.variables import INSIDE, SECRET

# sbatch options that follow from the composition -> the keys that decide them
OWNED = {
    "--nodes": "runtime.slurm.nodes",
    "--partition": "runtime.slurm.partition",
    "--account": "runtime.slurm.account",
    "--qos": "runtime.slurm.qos",
    "--time": "runtime.slurm.time",
    "--gres": "runtime.slurm.gres and topology.num_gpus",
    **dict.fromkeys(
        ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "topology.num_gpus"
    ),
    "--signal": "runtime.slurm.early_signal_s",
    "--requeue": "runtime.slurm.requeue",
    "--no-requeue": "runtime.slurm.requeue",
    "--wait": "runtime.slurm.wait",
    "--job-name": "name",
    **dict.fromkeys(
        ("--ntasks", "--ntasks-per-node", "--tasks-per-node"),
        "the launcher, which starts one task a node",
    ),
    **dict.fromkeys(
        ("--output", "--error", "--open-mode", "--chdir", "--export"),
        "the launcher, which keeps a run's files together",
    ),
    **dict.fromkeys(
        ("--array", "--parsable", "--test-only", "--wrap"), "the launcher, because a job is one run"
    ),
}
LONG_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?")


def runtime_as(config: Config, runtime: str) -> str:
    """Return the override that selects a runtime; inside a job it is a key of runtime.slurm."""
    return f"{'runtime.slurm.inner' if config.runtime.name == 'slurm' else 'runtime'}={runtime}"


def image_faults(c: Config) -> Iterator[Refusal]:
    name, gfx, trl = c.container.name, c.hardware.gfx, lock()["trl"]
    if c.runtime.on_node != "docker" or name == "custom":
        return
    known = images.load()
    serving = [f"container={i.name}" for i in known.values() if gfx in i.gfx and i.trl == trl]
    custom = "container=custom container.reference=<an image of your own>"
    remedy, fault = " or ".join([*serving, custom]), ""
    if name == "none":
        fault = f"{runtime_as(c, 'docker')} with container=none: an image is missing"
        remedy += f"; or {runtime_as(c, 'local')}"
    elif name not in known:
        fault, remedy = (
            f"container={name}: no such image",
            f"one of {', '.join(known)}; or {custom}",
        )
    elif c.hardware.vendor != Vendor.none and gfx not in known[name].gfx:
        fault = f"container={name} has no code for {gfx}"
    elif known[name].trl != trl:
        fault = f"container={name} has another TRL than {trl}"
    if fault:
        yield Refusal("image", fault, remedy)


def secret_faults(c: Config) -> Iterator[Refusal]:
    """Yield secrets that records would hold, and variables that the plan itself sets."""
    mappings = {
        "user_env": c.user_env,
        "method.args": c.method.args,
        engine_args.KEY: c.topology.server_args,
    }
    for group, values in mappings.items():
        for name, value in values.items():
            if value and isinstance(value, str) and SECRET.search(key := f"{group}.{name}"):
                remedy = "a variable of your shell (export HF_TOKEN=...), which processes inherit"
                yield Refusal("secret", f"{key}: the run's records would hold a secret", remedy)
    if any(name in c.user_env for name in masks.ALL):
        message = "user_env: a GPU mask would give every process the same GPUs"
        yield Refusal("mask_in_user_env", message, "HIP_VISIBLE_DEVICES=2,3 in your shell")
    own = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *INSIDE, *MASK.values(), *c.user_env}
    for name in c.runtime.secrets:
        if not name.isidentifier() or name in own:
            message = f"runtime.secrets: {name!r} is already set or not a valid name"
            remedy = "names only, for example runtime.secrets=[HF_TOKEN,MY_KEY], and the values in "
            yield Refusal("secret_names", message, f"{remedy}your shell")


def profile_faults(c: Config) -> Iterator[Refusal]:
    """Yield what rocprof-compute, which repeats the program, cannot repeat."""
    if (c.profile, c.rocprof) != (Profile.rocprof, Rocprof.compute):
        return
    if num_trainers(c) > 1 or argument(c, "save_strategy") not in (None, "no"):
        steps = " method.args.save_strategy=no method.args.max_steps=5" * c.method.trains
        message = "rocprof=compute repeats the program, on one rank and without a checkpoint"
        yield Refusal("rocprof_compute_alone", message, f"topology=single{steps}; or rocprof=v3")


def slurm_faults(c: Config) -> Iterator[Refusal]:
    slurm = c.runtime.slurm
    if c.runtime.name != "slurm":
        return
    for option in slurm.options:
        # an option may be abbreviated, as in getopt
        name, is_long = option.partition("=")[0], LONG_OPTION.fullmatch(option)
        owner = OWNED.get(name) or next((OWNED[o] for o in OWNED if o.startswith(name)), None)
        if owner or not is_long:
            why = f"is decided by {owner}" if is_long else "is not a long option"
            remedy = (
                "other options, such as runtime.slurm.options=['--exclusive','--constraint=ib']"
            )
            yield Refusal("slurm_options", f"runtime.slurm.options: {option!r} {why}", remedy)
    if 0 < (seconds := slurm_seconds(slurm.time or "0")) <= slurm.early_signal_s:
        message = f"runtime.slurm.time={slurm.time}: Slurm would stop the job "
        message += f"{slurm.early_signal_s} s before, as it starts"
        remedy = "a longer time"
        if seconds > 60:
            remedy += ", or runtime.slurm.early_signal_s=60 runtime.stop_timeout_s=30"
        yield Refusal("slurm_time_early", message, remedy)
    yield from outside(
        "slurm_early_signal",
        "runtime.slurm.early_signal_s",
        slurm.early_signal_s,
        Range(least=c.runtime.stop_timeout_s + 1, most=65535),
        "a save may take runtime.stop_timeout_s, after this signal",
        "a smaller runtime.stop_timeout_s",
    )
