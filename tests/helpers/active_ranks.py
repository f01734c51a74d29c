"""Run recipes/measure/health.py with a process that fails in the way that TORCH_WRONG selects."""

import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[sys.argv.index("--folder") + 1])
IS_BAD = os.environ["RANK"] == "1"


def hang():
    (FOLDER / "rank0.json").write_text("{}")
    time.sleep(600)


def cut_off():
    (FOLDER / f"rank{os.environ['RANK']}.json").write_text('{\n "rank": 1,\n "phase": "do')


def die():
    from recipes.measure import health

    if IS_BAD:
        health.measure_gemm = lambda rank: os.kill(os.getpid(), signal.SIGKILL)
    health.main()


if __name__ == "__main__":
    {"hangs": hang, "is cut off": cut_off, "dies": die}[os.environ["TORCH_WRONG"]]()
