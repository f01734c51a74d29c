"""Train several configurations in turn on a rank, so that a strategy's libraries load once.

The last configuration is the one before it, resumed from its checkpoint of step 2. It is started by
test_adapter_strategies.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState

from recipes.rank import program
from recipes.sft import sft


def train(config: str, work: Callable = sft) -> None:
    code = program.run(work, ["--config", config])
    if code:
        sys.stderr.flush()
        os._exit(code)
    PartialState().wait_for_everyone()  # the main rank has saved
    AcceleratorState._reset_state()  # the precision of the run before


def main() -> None:
    *configs, resumed = sys.argv[1:]
    for config in configs:
        train(config)
    if program.is_main_rank():
        half = Path("checkpoints/checkpoint-2")
        shutil.copytree(Path(configs[-1]).parent / half, Path(resumed).parent / half)
    PartialState().wait_for_everyone()
    train(resumed)
    sys.stdout.flush()
    os._exit(0)  # as recipes/rank/program.py ends ranks of gloo


if __name__ == "__main__":
    main()
