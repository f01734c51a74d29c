"""What may be added to the environment of `make setup`, each from a hashed lock of its own that changes nothing of it.

    .venv/bin/python containers/add_ons.py vllm            vLLM's build for the CPU
    .venv/bin/python containers/add_ons.py quantization    torchao and bitsandbytes: fp8 and nf4
    .venv/bin/python containers/add_ons.py kernels         Triton and Liger's kernels, to compile them for GPUs that are not there
    .venv/bin/python containers/add_ons.py gguf            the package gguf: GGUF files, read and written
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

from containers.environment import ADDED, LOCKS, LOG, VENV, Progress, Refused, Step, finish, pip_install, read_stamp, run_step, venv_python

# Their target of make, and lock. quantization is none of setup's: every rank would import it, for two seconds.
ADD_ONS = {
    "vllm": "vLLM's build for the CPU",
    "quantization": "torchao and bitsandbytes",
    "kernels": "Triton with Liger's kernels",
    "gguf": "the package gguf",
    "lm-eval": "lm-evaluation-harness",
}


def vllm_refusal(build: str, system: str, machine: str, cpu_flags: set[str]) -> str | None:
    """Why vLLM's build for the CPU cannot be had here. Without it smoke=true generates with transformers, which every machine can."""
    if (system, machine) != ("Linux", "x86_64") or "avx2" not in cpu_flags:
        lacking = " without AVX2" if machine == "x86_64" else ""
        return f"vLLM's build for the CPU is for Linux on x86-64 with AVX2, and this is {system} on {machine}{lacking}"
    if build != "cpu":
        return f"vLLM's build for the CPU needs torch's, and .venv has that for {build}. To change it: make setup TORCH=cpu, then make vllm"
    return None


def kernels_refusal(build: str, system: str) -> str | None:
    """Why Triton cannot be added. CUDA's torch has brought the same one."""
    if system != "Linux":
        return f"Triton is for Linux, and this is {system}"
    own = "torch's ROCm build has a Triton of its own, which a second one would overwrite. To change it: make setup TORCH=cpu"
    return own if build == "rocm" else None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of this CPU by Linux's names; empty elsewhere."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()[2:]}


def add_on(venv: Path, name: str) -> bool:
    """Whether anything had to be done. Adds packages to those of setup(), and changes none: its lock agrees with theirs."""
    build, system = read_stamp(venv).get("torch"), platform.system()
    if build is None:
        raise Refused(f"There is no .venv to add {ADD_ONS[name]} to. Run make setup first")
    refusal = {"vllm": vllm_refusal(build, system, platform.machine(), cpu_flags()), "kernels": kernels_refusal(build, system)}.get(name)
    if refusal:
        raise Refused(refusal, 3)
    lock = LOCKS / f"{name}.lock"
    done, target = venv / f"{name}{ADDED}", hashlib.sha256(lock.read_bytes()).hexdigest()
    if done.exists() and done.read_text() == target:
        return False
    step = Step(ADD_ONS[name], (pip_install(venv_python(venv), lock),))
    if not run_step(step, Progress(venv / LOG, steps=1)):
        raise Refused(f"{step.title}: pip failed, its last lines stand above. All of its output: {venv / LOG}", 3)
    done.write_text(target)
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Adds to the environment in .venv")
    parser.add_argument("name", choices=ADD_ONS)
    name = parser.parse_args(argv).name
    return finish(lambda: add_on(VENV, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
