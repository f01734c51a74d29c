"""Reject secrets in records, GPU masks in user_env, and wrong options of a Slurm job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launch.inputs import engine_args
from launch.machine import masks
from launch.rules.refusal import Refusal
from launch.schema import Config
from launch.schema.host import slurm_seconds
from launch.schema.variables import RANK_NAMES, SECRET, is_public

# sbatch options that keys of the composition or the launcher set
OWNED = """--nodes --partition --account --qos --time --gres --signal --requeue --no-requeue --wait
--job-name --gpus --gpus-per-node --gpus-per-task --gpus-per-socket --ntasks --ntasks-per-node
--tasks-per-node --output --error --open-mode --chdir --export --array --parsable --test-only
--wrap""".split()
LONG_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?")


def runtime_as(config: Config, runtime: str) -> str:
    """Return the override that selects a runtime; under Slurm, the runtime inside the job."""
    if config.runtime.name != "slurm":
        return f"runtime={runtime}"
    return f"runtime.slurm.container={'none' if runtime == 'local' else runtime}"


def secret_problems(c: Config) -> Iterator[Refusal]:
    """Reject secrets that records would contain, and variables that only processes may have."""
    for group, values in (
        ("method.args", c.method.args),
        (engine_args.KEY, c.topology.server_args),
    ):
        for name, value in values.items():
            if value and isinstance(value, str) and SECRET.search(key := f"{group}.{name}"):
                remedy = "a variable of your shell (export HF_TOKEN=...), which processes inherit"
                yield Refusal("secret", f"{key}: the run's records would contain a secret", remedy)
    # launch/config/user_secrets.py has moved secrets of the command line, but not those of files.
    for name, value in c.user_env.items():
        if name in c.runtime.public_env or is_public(name, value) or RANK_NAMES.fullmatch(name):
            continue
        message = f"user_env.{name}: the run's records would contain its value, perhaps a secret"
        passed = f"runtime.pass_env=[{','.join([*c.runtime.pass_env, name])}]"
        public = f"runtime.public_env=[{','.join([*c.runtime.public_env, name])}]"
        remedy = f"{public} if it is not secret"
        if name.isidentifier():  # otherwise no shell can export it
            remedy = f"export {name}=<value> with {passed}, or {remedy}"
        yield Refusal("secret", message, remedy)
    if any(name in c.user_env for name in masks.ALL):
        message = "user_env: a GPU mask would give every process the same GPUs"
        yield Refusal("mask_in_user_env", message, "HIP_VISIBLE_DEVICES=2,3 in your shell")
    for name in filter(RANK_NAMES.fullmatch, c.user_env):
        message = f"user_env.{name}: torchrun sets it for each rank"
        yield Refusal(
            "rank_in_user_env", message, "topology.num_gpus=<number>, or ~user_env." + name
        )


def slurm_problems(c: Config) -> Iterator[Refusal]:
    slurm = c.runtime.slurm
    if c.runtime.name != "slurm":
        return
    for option in slurm.options:
        # Slurm accepts abbreviated options, like getopt.
        name, is_long = option.partition("=")[0], LONG_OPTION.fullmatch(option)
        if not is_long or any(own.startswith(name) for own in OWNED):
            why = "set by another key or by the launcher" if is_long else "not a long option"
            remedy = "a key of runtime.slurm, name= or topology.num_gpus=; here, only options like "
            remedy += "runtime.slurm.options=['--exclusive','--constraint=ib']"
            yield Refusal("slurm_options", f"runtime.slurm.options: {option!r} is {why}", remedy)
    if 0 < (seconds := slurm_seconds(slurm.time or "0")) <= slurm.early_signal_s:
        message = f"runtime.slurm.time={slurm.time}: Slurm would stop the job as it starts, "
        message += f"because runtime.slurm.early_signal_s={slurm.early_signal_s} is not shorter"
        remedy = "a longer time"
        if seconds > 60:
            remedy += ", or runtime.slurm.early_signal_s=60 runtime.stop_timeout_s=30"
        yield Refusal("slurm_time_early", message, remedy)
