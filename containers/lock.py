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

# Lock -> earlier locks whose versions it keeps, in the order in which `make lock` resolves them.
# Those of make setup keep to requirements; add-ons keep to the test tools too, and gguf and
# lm-eval, which do not require torch, to vLLM.
CONSTRAINTS = {
    "requirements": (),
    **dict.fromkeys(("uv", "tools", "compiled", "torch_pypi", "dev"), ("requirements",)),
    **dict.fromkeys(("liger", "quantization"), ("requirements",)),
    **dict.fromkeys(("vllm", "kernels"), ("requirements", "dev")),
    **dict.fromkeys(("gguf", "lm-eval"), ("requirements", "dev", "vllm")),
}
# Resolved without the dependencies they share: torch and Triton are already installed, from an
# image's base or from another lock.
OVER_TORCH = ("liger", "quantization")
# Resolved with requirements.in, but omitted from its lock, because other locks have them.
ELSEWHERE = ("pycosat", "torch", "triton")
# Packages of torch's CUDA build. uv has no pattern for names; a test fails if torch brings another
# one.
CUDA = """
cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc
nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver
nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13
nvidia-nvtx
""".split()


def uv_compile(uv: Path, name: str) -> tuple[str, ...]:
    """Return uv's command, with paths relative to the root so that a lock names no machine."""
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
            print(f"error: {name}.in could not be resolved, see uv's message", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
