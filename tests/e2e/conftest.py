"""Share the processes of rewards among the runs of these tests.

Each process imports the tasks for a second, and most runs judge a few completions.
tests/recipes/rewards/test_verifier.py tests processes that start, hang and end.
"""

from __future__ import annotations

import select
import subprocess
from collections import defaultdict

import pytest

from recipes.rewards.verify_isolated import Isolated


@pytest.fixture(scope="session", autouse=True)
def shared_reward_processes():
    idle: dict[tuple, list[subprocess.Popen]] = defaultdict(list)
    create, start, delete = Isolated.__init__, Isolated.start, Isolated.__del__

    def kind(worker: Isolated) -> tuple:
        return worker.time_s, worker.memory_gb, *sorted(worker.names)

    def take(self, *args, **kwargs):
        create(self, *args, **kwargs)
        # Garbage collection may have closed the pipes of a worker that was in a cycle.
        usable = [process for process in idle[kind(self)] if not process.stdin.closed]
        if usable:
            self.process, self._ready = usable.pop(), True
        idle[kind(self)] = usable

    def start_new(self):
        if self.process is None:
            start(self)

    def give_back(self):
        if self._ready and not select.select([self.process.stdout], [], [], 0)[0]:
            idle[kind(self)].append(self.process)
        else:
            delete(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Isolated, "__init__", take)
        patch.setattr(Isolated, "start", start_new)
        patch.setattr(Isolated, "__del__", give_back)
        yield
    for process in sum(idle.values(), []):
        process.kill()
        process.wait()
