"""Run a rank that chooses its best model, and resume it where it was killed.

test_best_ranks.py starts it with the folders of three configurations. The first is run whole. The
second resumes from the first's checkpoints of its best step and of the next save. The third resumes
from all its checkpoints, like a run killed while it writes its model. One process runs them all, so
that a strategy's libraries load once.
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


def copy_checkpoints(whole: Path, later: Path, last: int | None) -> None:
    """Copy the checkpoints of `whole` up to step `last`, or all for None."""
    if program.is_main_rank():
        for saved in (whole / "checkpoints").iterdir():
            if last is None or checkpoint.step_of(saved) <= last:
                shutil.copytree(saved, later / "checkpoints" / saved.name)
    PartialState().wait_for_everyone()


def main() -> None:
    save_steps, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        train(str(folder / "whole/config.yaml"))
        best = json.loads((folder / "whole/result.json").read_text())["best_step"]
        for name, last in (("killed", best + int(save_steps)), ("ended", None)):
            copy_checkpoints(folder / "whole", folder / name, last)
            train(str(folder / name / "config.yaml"))
    sys.stdout.flush()
    os._exit(0)  # as recipes/rank/program.py ends ranks of gloo


if __name__ == "__main__":
    main()
