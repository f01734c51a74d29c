"""Decide which variables of the shell the processes of a run inherit."""

import os
import re
from collections.abc import Iterator, Mapping

from launch.core.errors import HostError
from launch.machine import masks
from launch.schema import Config
from launch.schema.variables import GPU_STACK, HOST, RANK_NAMES, READ_BY_TRAINERS, is_secret

# Each of these is the number of copies that another launcher has started.
SIZES = (
    *("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PALS_SIZE"),
)
# A socket's path has at most 107 bytes, and the longest name below TMPDIR is vLLM's, /<UUID>.
MAX_TMPDIR = 107 - len("/") - 36


def names(config: Config, environ: Mapping[str, str], settings: Mapping[str, object]) -> list[str]:
    """Return the names that a process on this machine inherits. `settings` are the plan's own.

    If these include a GPU mask, no other mask passes.
    """
    if config.runtime.in_container:
        return []
    withheld = {*settings, *(masks.ALL if any(name in settings for name in masks.ALL) else ())}
    return sorted(
        name for name in environ if name not in withheld and _passes(name, config, HOST, GPU_STACK)
    )


def _passes(name: str, config: Config, *patterns: re.Pattern[str]) -> bool:
    return not RANK_NAMES.fullmatch(name) and (
        name in config.runtime.pass_env or any(pattern.fullmatch(name) for pattern in patterns)
    )


def secret_files(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return the names that a container gets as files: runtime.secrets, pass_env and passwords."""
    listed = {*config.runtime.secrets, *config.runtime.pass_env}
    in_urls = {n for n, v in environ.items() if GPU_STACK.fullmatch(n) and is_secret("", v)}
    return sorted(name for name in listed | in_urls if environ.get(name))


def warnings(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning about variables that trainers read and that do not pass."""
    dropped = sorted(
        name for name in environ if READ_BY_TRAINERS.fullmatch(name) and not _passes(name, config)
    )
    dropped = [name for name in dropped if name not in config.user_env]
    if dropped:
        allowed = [name for name in dropped if not RANK_NAMES.fullmatch(name)]
        remedy = f" Use: runtime.pass_env=[{','.join(allowed)}] to pass them." if allowed else ""
        yield f"runtime: {', '.join(dropped)} of your shell do not reach the run.{remedy}"


def check_copies(environ: Mapping[str, str]) -> None:
    """Raise HostError if another launcher runs several copies of this command."""
    for name in SIZES:
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            raise HostError(
                f"{name}={environ[name]}: another launcher (torchrun, srun or mpirun) runs this "
                f"command {environ[name]} times, and each copy would train. Start it once, because "
                f"it starts the ranks itself. If it runs only once: unset {name}"
            )


def check_tmpdir(config: Config, environ: Mapping[str, str]) -> None:
    """Raise HostError if sockets below the temporary directory would have too long paths."""
    environ = {**environ, **config.user_env}
    for name in ("TMPDIR", "TEMP", "TMP"):  # in the order of Python's tempfile
        folder = os.path.abspath(environ.get(name) or "/tmp")
        if environ.get(name) and os.path.isdir(folder):
            if len(os.fsencode(folder)) > MAX_TMPDIR:
                raise HostError(
                    f"{name}={folder}: loader workers would hang, because paths of sockets in this "
                    f"directory are too long. Use: user_env.{name}=/tmp, or at most {MAX_TMPDIR} "
                    "bytes."
                )
            return
