"""Resolve containers/cpu/*.in into hashed locks with uv (`make lock`).

Existing pins stay unless a .in file requires another version.

    .venv/bin/python containers/lock.py

Exit codes: 0 done, 3 a file cannot be resolved (no network, conflicting versions).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "containers" / "cpu"

# Lock -> earlier locks that constrain its versions, in the order of resolution. The same .venv can
# hold `make setup`'s packages and all add-ons, so their versions must agree.
CONSTRAINTS = {
    "requirements": (),
    **dict.fromkeys(("uv", "tools", "compiled", "torch_pypi", "dev"), ("requirements",)),
    **dict.fromkeys(("liger", "quantization"), ("requirements",)),
    **dict.fromkeys(("vllm", "kernels"), ("requirements", "dev")),
    **dict.fromkeys(("gguf", "lm-eval"), ("requirements", "dev", "vllm")),
    "docs": (),  # in an environment of its own
}
# Locks without dependencies, because the image's base or another lock has them (torch, Triton).
OVER_TORCH = ("liger", "quantization")
# Packages that requirements.lock omits, because other locks have them.
ELSEWHERE = ("pycosat", "torch", "triton")
# Packages of torch's CUDA build, which uv can exclude only by full name. A test fails if one is
# missing here.
CUDA = """
cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc
nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver
nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13
nvidia-nvtx
""".split()


def uv_compile(uv: Path, name: str) -> tuple[str, ...]:
    """Return uv's argv. Its paths are relative, since uv writes them into the lock."""
    folder = LOCKS.relative_to(ROOT)
    options = "--quiet --generate-hashes --universal --python-version 3.11".split()
    options += ["--custom-compile-command", "make lock"]
    if name == "requirements":
        options += [f"--no-emit-package={package}" for package in (*ELSEWHERE, *CUDA)]
    for other in CONSTRAINTS[name]:
        options += ["--constraints", str(folder / f"{other}.lock")]
    if name in OVER_TORCH:
        options += ["--no-deps"]
    if (LOCKS / f"{name}.toml").is_file():
        options += ["--config-file", str(folder / f"{name}.toml")]
    files = ("--output-file", str(folder / f"{name}.lock"), str(folder / f"{name}.in"))
    return (str(uv), "pip", "compile", *options, *files)


def main() -> int:
    for name in CONSTRAINTS:
        print(f"{name}.lock", flush=True)
        argv = uv_compile(Path(sys.executable).with_name("uv"), name)
        if subprocess.run(argv, cwd=ROOT, check=False).returncode:
            print(f"error: {name}.in cannot be resolved. See uv's message above.", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
