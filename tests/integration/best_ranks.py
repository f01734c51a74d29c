"""Run a rank that chooses its best model, and resume it where it was killed.

test_best_ranks.py starts it with folders of two configurations each. The first is run whole. The
second resumes from the first's checkpoints of its best step and of the next save. One process runs
them all, so that a strategy's libraries load once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from accelerate import PartialState

from recipes.rank import program
from recipes.training import checkpoint
from tests.integration.adapter_ranks import train


def copy_checkpoints(whole: Path, killed: Path, last: int) -> None:
    """Copy the checkpoints of `whole` up to step `last`."""
    if program.is_main_rank():
        for saved in (whole / "checkpoints").iterdir():
            if checkpoint.step_of(saved) <= last:
                shutil.copytree(saved, killed / "checkpoints" / saved.name)
    PartialState().wait_for_everyone()


def main() -> None:
    save_steps, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        train(str(folder / "whole/config.yaml"))
        best = json.loads((folder / "whole/result.json").read_text())["best_step"]
        copy_checkpoints(folder / "whole", folder / "killed", best + int(save_steps))
        train(str(folder / "killed/config.yaml"))
    sys.stdout.flush()
    os._exit(0)  # as recipes/rank/program.py ends ranks of gloo


if __name__ == "__main__":
    main()
