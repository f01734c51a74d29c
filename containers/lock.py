"""`make lock`: resolve containers/cpu/*.in into hashed locks, with uv.

Existing pins stay unless a source asks for another.

    .venv/bin/python containers/lock.py

Exit codes: 0 done, 3 something could not be resolved (a network, versions that contradict each
other).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"

# In the order in which `make lock` resolves them; later ones keep to the versions of the first.
COMPILED = (
    "requirements",
    "uv",
    "tools",
    "compiled",
    "torch_pypi",
    "dev",
    "liger",
    "quantization",
    "vllm",
    "kernels",
    "gguf",
    "lm-eval",
)
# Installed next to the test tools, and resolved with separate configurations. For quantization,
# only the packages that it names are locked.
ADD_ONS = ("vllm", "kernels")
# Installed next to those and vLLM. Neither requires torch.
TOOLS = ("gguf", "lm-eval")
# Resolved without the dependencies they share: torch and Triton are already installed, from an
# image's base or from another lock.
OVER_TORCH = ("liger", "quantization")
# Resolved with requirements.in, but omitted from its lock, because other locks have them.
ELSEWHERE = ("pycosat", "torch", "triton")
# Brought by torch's CUDA build. uv has no pattern for names; a test fails if torch brings another
# one.
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
    """Return uv's command, with paths relative to the root so that a lock names no machine."""
    folder = LOCKS.relative_to(ROOT)
    options = [
        "--quiet",
        "--generate-hashes",
        "--universal",
        "--python-version",
        "3.11",
        "--custom-compile-command",
        "make lock",
    ]
    if name == "requirements":
        options += [f"--no-emit-package={package}" for package in (*ELSEWHERE, *CUDA)]
    else:
        options += ["--constraints", str(folder / "requirements.lock")]
    if name in OVER_TORCH:
        options += ["--no-deps"]
    if name in ADD_ONS:
        options += [
            "--constraints",
            str(folder / "dev.lock"),
            "--config-file",
            str(folder / f"{name}.toml"),
        ]
    if name in TOOLS:
        options += [
            "--constraints",
            str(folder / "dev.lock"),
            "--constraints",
            str(folder / "vllm.lock"),
        ]
    return (
        str(uv),
        "pip",
        "compile",
        *options,
        "--output-file",
        str(folder / f"{name}.lock"),
        str(folder / f"{name}.in"),
    )


def main() -> int:
    for name in COMPILED:
        print(f"{name}.lock", flush=True)
        if subprocess.run(
            uv_compile(Path(sys.executable).with_name("uv"), name), cwd=ROOT, check=False
        ).returncode:
            print(
                f"error: {name}.in could not be resolved; what uv says stands above",
                file=sys.stderr,
            )
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
