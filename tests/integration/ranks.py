"""Train several configurations in the same processes, so that libraries are loaded only once.

    python -m torch.distributed.run ... -m tests.integration.ranks <method> <run directory>...

`from:to:last` resumes: it trains `to` from the checkpoints of `from` up to step `last`. `best+2` is
two steps after the best step of `from`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState

from recipes.rank import program
from recipes.training import checkpoint
from tests.conftest import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_ranks(method: str, *steps: object, num_ranks: int = 2) -> None:
    """Run this program on `num_ranks` ranks, and check its exit code."""
    start = TORCHRUN if num_ranks > 1 else []
    argv = [sys.executable, *start, "-m", "tests.integration.ranks", method, *map(str, steps)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def train(recipe: Callable, run_dir: Path) -> None:
    code = program.run(recipe, ["--config", str(run_dir / "config.yaml")])
    if code:
        sys.stderr.flush()
        os._exit(code)
    PartialState().wait_for_everyone()  # until the main rank has saved
    AcceleratorState._reset_state()  # discard the previous run's precision


def copy_checkpoints(complete: Path, killed: Path, last: str) -> None:
    """Copy the checkpoints of `complete` up to step `last`."""
    word, _, more = last.rpartition("+")
    best = json.loads((complete / "result.json").read_text())["best_step"] if word else 0
    if program.is_main_rank():
        for saved in (complete / "checkpoints").iterdir():
            if checkpoint.step_of(saved) <= best + int(more):
                shutil.copytree(saved, killed / "checkpoints" / saved.name)
    PartialState().wait_for_everyone()


def main() -> None:
    method, *steps = sys.argv[1:]
    recipe = getattr(importlib.import_module(f"recipes.{method}"), method)
    for step in steps:
        *copied, last = step.split(":")
        run_dir = Path(copied[1] if copied else step)
        if copied:
            copy_checkpoints(Path(copied[0]), run_dir, last)
        train(recipe, run_dir)
    sys.stdout.flush()
    os._exit(0)  # like recipes/rank/program.py, for ranks with gloo


if __name__ == "__main__":
    main()
