"""What goes wrong in the runs of test_split.py, through two doors that are everybody's: a GRPO reward and a plugin of vLLM.

A test copies this file to where it starts the launcher. There the file `fault` says what happens and at which step, for example
`kill 3`, or `first 3` where the first rank dies and not the last; who does it removes that file first, so it happens once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import time
import zlib
from pathlib import Path

from recipes.common import program

FAULT = Path("fault")


def reward(prompts, completions, trainer_state, **columns) -> list[float]:
    """From 0 to 1, by the completion's text: random, and the same in every run. A rank meets its fault here, inside a step."""
    if program.rank() == 0:
        with Path("trained").open("a") as file:
            file.write(json.dumps([trainer_state.global_step + 1, prompts]) + "\n")
        if due("first", trainer_state.global_step + 1):
            kill()
    if program.rank() == int(os.environ["WORLD_SIZE"]) - 1:
        for name, happens in {"kill": kill, "hang": hang_here, "stop": stop_launcher, "lose": lose_launcher}.items():
            if due(name, trainer_state.global_step + 1):
                happens()
    return [zlib.crc32(str(completion).encode()) % 101 / 100 for completion in completions]


def register() -> None:
    """vLLM calls this in each of its processes. The server dies in the middle of a weight transfer."""
    from recipes.smoke.gloo_server import GlooWeightTransferEngine  # ranks have no vLLM to import

    receive_all, count = GlooWeightTransferEngine.receive_weights, itertools.count(1)

    def receive(self, update_info) -> None:
        if due("sync", next(count)):
            columns = ("names", "dtype_names", "shapes")
            half = len(update_info.names) // 2
            receive_all(self, dataclasses.replace(update_info, **{name: getattr(update_info, name)[:half] for name in columns}))
            kill()
        receive_all(self, update_info)

    GlooWeightTransferEngine.receive_weights = receive


def due(name: str, number: int) -> bool:
    if not FAULT.is_file() or FAULT.read_text() != f"{name} {number}":
        return False
    FAULT.unlink()
    return True


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_here() -> None:
    while True:
        time.sleep(0.05)


def stop_launcher() -> None:
    _signal_launcher(signal.SIGTERM)


def lose_launcher() -> None:
    _signal_launcher(signal.SIGKILL)


def _signal_launcher(number: int) -> None:
    """And stay in this step until this rank is asked to stop, so that it is known after which step it does."""
    os.kill(int(os.environ["ROCM_RECIPES_PROCESS"].partition("/")[0]), number)
    while not program.stop_asked():
        time.sleep(0.02)
