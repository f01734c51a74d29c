"""Add a set of packages to .venv from a hashed lock, without changing what is installed.

    .venv/bin/python containers/add_ons.py vllm            vLLM's build for the CPU
    .venv/bin/python containers/add_ons.py quantization    torchao and bitsandbytes: fp8 and nf4
    .venv/bin/python containers/add_ons.py kernels         Triton and Liger: compile kernels
    .venv/bin/python containers/add_ons.py gguf            read and write GGUF files
    .venv/bin/python containers/add_ons.py lm-eval         lm-evaluation-harness

Exit codes: as in containers/environment.py.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from containers import environment
from containers.environment import BUILDS, LOCKS, VENV
from launch.core.errors import HostError, UserError


class AddOn(NamedTuple):
    builds: tuple[str, ...] = (*BUILDS, "macos")  # builds of torch that the add-on works with
    machine: str = ""  # the only architecture that the lock has files for


# Each name is a target of make and the name of a lock. `make setup` omits quantization, because
# every rank would import it, which takes two seconds. kernels does not support torch's ROCm build,
# because its Triton would overwrite the one of that build.
ADD_ONS = {
    "vllm": AddOn(builds=("cpu",), machine="x86_64"),
    "quantization": AddOn(),
    "kernels": AddOn(builds=("cpu", "cuda")),
    "gguf": AddOn(),
    "lm-eval": AddOn(),
}


def install(venv: Path, name: str) -> bool:
    """Add a set of packages; return False if it is already installed."""
    add_on, build = ADD_ONS[name], environment.read_stamp(venv).get("torch")
    if build is None:
        raise UserError(f"make {name}: .venv does not exist. Run make setup first")
    if build not in add_on.builds or add_on.machine not in ("", platform.machine()):
        machine = f" on {add_on.machine}" if add_on.machine else ""
        raise HostError(
            f"make {name} needs torch's build for {' or '.join(add_on.builds)}{machine}, but .venv "
            f"has the build for {build} on {platform.machine()}. Run make setup TORCH=cpu, then "
            f"make {name}"
        )
    lock, stamp = LOCKS / f"{name}.lock", venv / f"{name}{environment.ADDED}"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    environment.install_all(venv, [lock])
    stamp.write_text(digest)
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Add packages to the environment in .venv.")
    parser.add_argument("name", choices=ADD_ONS)
    name = parser.parse_args(argv).name
    return environment.finish(lambda: install(VENV, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
