"""Add packages to .venv, each set from a hashed lock that changes none of the others.

    .venv/bin/python containers/add_ons.py vllm            vLLM's build for the CPU
    .venv/bin/python containers/add_ons.py quantization    torchao and bitsandbytes: fp8 and nf4
    .venv/bin/python containers/add_ons.py kernels         Triton and Liger, for absent GPUs
    .venv/bin/python containers/add_ons.py gguf            read and write GGUF files
    .venv/bin/python containers/add_ons.py lm-eval         lm-evaluation-harness

Exit codes: those of containers/environment.py.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from containers import environment
from containers.environment import LOCKS, VENV, Step, venv_python
from launch.core.errors import HostError, UserError

# Target of make, and name of the lock -> title. Setup omits quantization, because every rank would
# import it, which takes two seconds.
ADD_ONS = {
    "vllm": "vLLM's build for the CPU",
    "quantization": "torchao and bitsandbytes",
    "kernels": "Triton with Liger's kernels",
    "gguf": "the package gguf",
    "lm-eval": "lm-evaluation-harness",
}


def vllm_refusal(build: str, system: str, machine: str, cpu_flags: set[str]) -> str | None:
    """Return why vLLM's CPU build is unavailable here.

    Without it, smoke=true generates with transformers.
    """
    if (system, machine) != ("Linux", "x86_64") or "avx2" not in cpu_flags:
        without = " without AVX2" if machine == "x86_64" else ""
        linux = "Linux on x86-64 with AVX2"
        return f"vLLM's CPU build is for {linux}, and this is {system} on {machine}{without}"
    if build != "cpu":
        remedy = "Use: make setup TORCH=cpu, then make vllm"
        return f"vLLM's CPU build needs torch's, and .venv has that for {build}. {remedy}"
    return None


def kernels_refusal(build: str, system: str) -> str | None:
    """Return why Triton cannot be added. torch's CUDA build already brings the same one."""
    if system != "Linux":
        return f"Triton is for Linux, and this is {system}"
    if build == "rocm":
        remedy = "Use: make setup TORCH=cpu"
        return (
            f"torch's ROCm build has its own Triton, which a second one would overwrite. {remedy}"
        )
    return None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return this CPU's instruction sets by Linux's names; empty on other systems."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()[2:]}


def add_on(venv: Path, name: str) -> bool:
    """Add a set of packages; return whether there was anything to do."""
    build, system = environment.read_stamp(venv).get("torch"), platform.system()
    if build is None:
        raise UserError(f"There is no .venv to add {ADD_ONS[name]} to. Run make setup first")
    refusal = None
    if name == "vllm":
        refusal = vllm_refusal(build, system, platform.machine(), cpu_flags())
    elif name == "kernels":
        refusal = kernels_refusal(build, system)
    if refusal:
        raise HostError(refusal)
    lock = LOCKS / f"{name}.lock"
    stamp, digest = (
        venv / f"{name}{environment.ADDED}",
        hashlib.sha256(lock.read_bytes()).hexdigest(),
    )
    if stamp.exists() and stamp.read_text() == digest:
        return False
    python = venv_python(venv)
    progress = environment.Progress(venv / environment.LOG, 1, python)
    environment.run_step(Step(ADD_ONS[name], environment.install_lock(python, lock)), progress)
    stamp.write_text(digest)
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Add packages to the environment in .venv.")
    parser.add_argument("name", choices=ADD_ONS)
    name = parser.parse_args(argv).name
    return environment.finish(lambda: add_on(VENV, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
