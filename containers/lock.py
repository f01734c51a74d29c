"""`make lock`: resolves containers/cpu/*.in into hashed locks, with uv. Pins that are there stay unless a source asks for another.

    .venv/bin/python containers/lock.py

Exit codes: 0 done, 3 something could not be resolved (a network, versions that contradict each other).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"

# In the order in which `make lock` resolves them: the later ones keep to the versions of the first.
COMPILED = ("requirements", "pip", "tools", "compiled", "torch_pypi", "dev", "liger", "quantization", "vllm", "kernels", "gguf", "lm-eval")
# Installed beside the test tools, and resolved with a configuration of their own. Of quantization only what it names is locked.
ADD_ONS = ("vllm", "kernels")
# Installed beside those and vLLM. Neither asks for a torch.
TOOLS = ("gguf", "lm-eval")
# Resolved without what they need of others: torch and Triton are there before, from an image's base or from a lock of their own.
OVER_TORCH = ("liger", "quantization")
# Resolved with requirements.in, but left out of its lock: they are in locks of their own.
ELSEWHERE = ("pycosat", "torch", "triton")
# What torch's CUDA build brings; uv has no pattern for names, and a test says so when torch brings one more.
CUDA = (
    "cuda-bindings",
    "cuda-pathfinder",
    "cuda-toolkit",
    "nvidia-cublas",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "nvidia-cufft",
    "nvidia-cufile",
    "nvidia-curand",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvjitlink",
    "nvidia-nvshmem-cu13",
    "nvidia-nvtx",
)


def uv_compile(uv: Path, name: str) -> tuple[str, ...]:
    """Paths are relative to the root, so that a lock names no machine."""
    folder = LOCKS.relative_to(ROOT)
    options = ["--quiet", "--generate-hashes", "--universal", "--python-version", "3.11", "--custom-compile-command", "make lock"]
    if name == "requirements":
        options += [f"--no-emit-package={package}" for package in (*ELSEWHERE, *CUDA)]
    else:
        options += ["--constraints", str(folder / "requirements.lock")]
    if name in OVER_TORCH:
        options += ["--no-deps"]
    if name in ADD_ONS:
        options += ["--constraints", str(folder / "dev.lock"), "--config-file", str(folder / f"{name}.toml")]
    if name in TOOLS:
        options += ["--constraints", str(folder / "dev.lock"), "--constraints", str(folder / "vllm.lock")]
    return (str(uv), "pip", "compile", *options, "--output-file", str(folder / f"{name}.lock"), str(folder / f"{name}.in"))


def main() -> int:
    for name in COMPILED:
        print(f"{name}.lock", flush=True)
        if subprocess.run(uv_compile(Path(sys.executable).with_name("uv"), name), cwd=ROOT, check=False).returncode:
            print(f"error: {name}.in could not be resolved; what uv says stands above", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
