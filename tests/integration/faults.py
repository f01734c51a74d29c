"""Make the runs of test_split.py fail, with a GRPO reward and a plugin of vLLM.

A test copies this file into the launcher's working directory. Each line of the file `fault` there
has a fault and its step, for example `hang 2` (the last rank hangs) or `first 3` (the first rank
dies). Lines are processed in order. A process removes the line before it fails, so that each fault
happens once.
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

from recipes.rank import program

FAULT = Path("fault")


def reward(prompts, completions, trainer_state, **columns) -> list[float]:
    """Return a reward from 0 to 1 that depends only on the completion's text.

    Ranks fail here, inside a step.
    """
    if program.rank() == 0:
        with Path("trained").open("a") as file:
            file.write(json.dumps([trainer_state.global_step + 1, prompts]) + "\n")
        if due("first", trainer_state.global_step + 1):
            kill()
    if program.rank() == int(os.environ["WORLD_SIZE"]) - 1:
        for name, fault in {"hang": hang_here, "lose": lose_launcher}.items():
            if due(name, trainer_state.global_step + 1):
                fault()
    return values(completions)


def values(completions) -> list[float]:
    return [zlib.crc32(str(completion).encode()) % 101 / 100 for completion in completions]


def held(prompts, completions, trainer_state, **columns) -> list[float]:
    """Return the same rewards, after the number of steps in the file `hold` only on a signal.

    A container sees this folder, but cannot write to it.
    """
    hold, step = Path(__file__).with_name("hold"), str(trainer_state.global_step)
    if hold.read_text() == step:
        print(f"holding after step {step}", flush=True)
    while hold.read_text() == step and not program.stop_requested():
        time.sleep(0.02)
    return values(completions)


def register() -> None:
    """Make the server die during a weight transfer. vLLM calls this in each of its processes."""
    from recipes.smoke.gloo_server import GlooWeightTransferEngine  # ranks cannot import vLLM

    receive_all, count = GlooWeightTransferEngine.receive_weights, itertools.count(1)

    def receive(self, update_info) -> None:
        if due("sync", next(count)):
            columns = ("names", "dtype_names", "shapes")
            half = len(update_info.names) // 2
            receive_all(
                self,
                dataclasses.replace(
                    update_info, **{name: getattr(update_info, name)[:half] for name in columns}
                ),
            )
            kill()
        receive_all(self, update_info)

    GlooWeightTransferEngine.receive_weights = receive


def due(name: str, number: int) -> bool:
    if not FAULT.is_file():
        return False
    first, _, others = FAULT.read_text().partition("\n")
    if first != f"{name} {number}":
        return False
    if others:
        FAULT.write_text(others)
    else:
        FAULT.unlink()
    return True


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_here() -> None:
    while True:
        time.sleep(0.05)


def lose_launcher() -> None:
    """Kill the launcher, and stay in this step until the rank gets a signal."""
    os.kill(int(os.environ["ROCM_RECIPES_PROCESS"].partition("/")[0]), signal.SIGKILL)
    while not program.stop_requested():
        time.sleep(0.02)
