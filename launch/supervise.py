"""Process groups started in order, watched, stopped together: the first failure, a hang or a signal ends all of them.

An attempt ends done, interrupted, failed or hung. Server and trainers share an attempt: a trainer that comes back needs a server
without the weights and the communicator of the one before.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launch import rundir, serving, watchdog
from launch.errors import EXIT_USER
from launch.logs import RANK_FAILED, Follower, last_lines
from launch.meaning import of as meaning_of
from launch.plan import Plan
from launch.progress import Progress
from launch.topology import Process
from launch.watchdog import Watchdog

POLL_S = 0.2
FAILED_GRACE_S = 15.0  # from the failure of a rank to the end of all: the others wait in a collective, and will wait for ever
ASK_AFTER = 0.1  # of hang_timeout_s without a step: then the server is asked what it does


class Started(Protocol):
    """A process group that was started; LocalProcess and ContainedProcess are such."""

    def poll(self) -> int | None: ...
    def ask_to_stop(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def remove(self) -> None: ...
    def why(self) -> str | None: ...
    def ask(self, port: int, path: str) -> str: ...
    def dump_stacks(self, folder: Path) -> None: ...


Starter = Callable[[Process, Path], Started]


@dataclass
class Outcome:
    """How an attempt ended: done, interrupted, failed or hung; for the last two, who was first and why."""

    status: str
    process: str | None = None
    why: str | None = None


@dataclass
class Group:
    """A process group that runs, with its log."""

    process: Process
    started: Started
    log: Follower
    failing_since: float | None = None  # a rank has failed, and torchrun waits for the others


@dataclass
class Attempt:
    """What is running, and since when nothing has got on."""

    plan: Plan
    progress: Progress
    stopping: list[int]
    groups: list[Group] = field(default_factory=list)
    begun: bool = False

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.plan.config.runtime.hang_timeout_s, time.monotonic())
        self.steps_before = watchdog.steps_done(self.plan.run_dir)
        self.tokens = 0.0

    def run(self, start: Starter) -> Outcome:
        """Start all in order, each when the one before is ready, and wait until the last has ended."""
        try:
            for process in self.plan.processes:
                log = self.plan.run_dir / "logs" / f"{process.name}.log"
                follower = Follower(log)
                group = Group(process, start(process, log), follower)
                self.groups.append(group)
                outcome = self._until(functools.partial(self._ready, group))
                if outcome:
                    return outcome
            return self._until(self._finished) or Outcome("done")
        finally:
            self._stop()

    def _until(self, reached: Callable[[], bool]) -> Outcome | None:
        while True:
            self._look()
            failed = self._first_failure()
            if failed:
                return failed
            if self.stopping:
                return Outcome("interrupted")
            if reached():
                return None
            if self._hung():
                return self._dump_stacks()
            time.sleep(POLL_S)

    def _ready(self, group: Group) -> bool:
        """A server is when it answers, what prepares when it has ended, ranks at once."""
        process, started = group.process, group.started
        if process.kind == "prepare":
            if started.poll() != 0:
                return False
            forget(self.plan.run_dir)  # its result would pass for the ranks'
            return True
        if process.port is None:
            return True
        self.progress.say(f"waiting for {process.name} to load and answer")
        ask = self._asker(group)
        if not serving.is_up(ask):
            return False
        serving.check(ask, self.plan.config, str(process.serves))
        self.progress.say("starting (imports and model)")
        return True

    def _finished(self) -> bool:
        return all(g.started.poll() == 0 for g in self.groups if g.process.kind != "server")

    def _look(self) -> None:
        """Copy new log lines to the terminal; notice a rank that failed while torchrun waits for the others."""
        for group in self.groups:
            for line in group.log.lines(all_of_it=group.started.poll() is not None):
                self.progress.log(group.process.name, line)
                if RANK_FAILED.search(line) and group.failing_since is None:
                    group.failing_since = time.monotonic()
        self.progress.update()

    def _first_failure(self) -> Outcome | None:
        """The servers stand first: trainers fail because their server did."""
        for group in self.groups:
            code, name = group.started.poll(), group.process.name
            ended_early = code == 0 and group.process.kind == "server"
            if code not in (None, 0) or ended_early:
                return Outcome("failed", name, group.started.why() or ("it ended by itself" if ended_early else None))
            if group.failing_since is not None and time.monotonic() - group.failing_since > FAILED_GRACE_S:
                return Outcome("failed", name)
        return None

    def _hung(self) -> bool:
        steps = watchdog.steps_done(self.plan.run_dir)
        self.begun = self.begun or steps != self.steps_before
        # Until training begins, whatever a log says is progress: a server that loads, a model that is drawn.
        loading = () if self.begun else tuple(group.log.offset for group in self.groups)
        now = time.monotonic()
        if self.watchdog.quiet_s(now) > ASK_AFTER * self.watchdog.timeout_s:
            self.tokens = self._tokens()
        return self.watchdog.hung((steps, loading, self.tokens), now)

    def _tokens(self) -> float:
        found = 0.0
        for group in self.groups:
            if group.process.port is not None:
                with contextlib.suppress(OSError):
                    found += watchdog.tokens(self._asker(group)("/metrics"))
        return found

    def _asker(self, group: Group) -> serving.Ask:
        port = group.process.port
        assert port is not None
        return lambda path: group.started.ask(port, path)

    def _dump_stacks(self) -> Outcome:
        folder = self.plan.run_dir / "stacks"
        folder.mkdir(exist_ok=True)
        for group in self.groups:
            group.started.dump_stacks(folder)
        quiet = self.watchdog.quiet_s(time.monotonic())
        return Outcome("hung", None, f"no step, no token and no load progress for {quiet:.0f} s; stacks of all processes are in {folder}")

    def _stop(self) -> None:
        """SIGTERM, time to save, then SIGKILL to what is left. The last that started first: a server outlives those it serves."""
        deadline = time.monotonic() + self.plan.config.runtime.stop_timeout_s
        for group in reversed(self.groups):
            if group.started.poll() is None:
                group.started.ask_to_stop()
                while group.started.poll() is None and time.monotonic() < self._deadline(group, deadline):
                    group.started.wait(POLL_S)
                    self._look()
            group.started.remove()
        self._look()

    def _deadline(self, group: Group, otherwise: float) -> float:
        """Ranks one of which has failed wait for it in a collective and can save nothing."""
        return otherwise if group.failing_since is None else min(otherwise, group.failing_since + FAILED_GRACE_S)


def supervise(plan: Plan, start: Starter, progress: Progress, stopping: list[int]) -> tuple[Outcome, int]:
    """Attempts until one is done or interrupted, or runtime.max_restarts are used up. Returns the last, and how many restarts it took."""
    most = plan.config.runtime.max_restarts
    for restarts in range(most + 1):
        forget(plan.run_dir)
        outcome = Attempt(plan, progress, stopping).run(start)
        if outcome.status in ("done", "interrupted") or restarts == most or not worth_another(plan.run_dir):
            break
        progress.say(f"{outcome.status}; restart {restarts + 1} of {most}, from the newest whole checkpoint")
        progress.note(describe(plan, outcome))
    return outcome, restarts


def forget(run_dir: Path) -> None:
    """What an earlier attempt has left and would pass for this one's."""
    (run_dir / "result.json").unlink(missing_ok=True)
    for file in (run_dir / "failures").glob("*.json"):
        file.unlink()


def worth_another(run_dir: Path) -> bool:
    """Not where a rank refused what the user gave: it would refuse it again."""
    return all(failure.get("exit_code") != EXIT_USER for failure in failures(run_dir))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """What ranks wrote as they failed, the first one first."""
    found = [rundir.read_json(file) or {} for file in sorted((run_dir / "failures").glob("*.json"))]
    return sorted((f for f in found if f), key=lambda f: float(f.get("time", 0)))


def describe(plan: Plan, outcome: Outcome) -> str:
    """Who failed first, why, the last lines of its log, and what they usually mean."""
    first = next(iter(failures(plan.run_dir)), None)
    name = outcome.process or plan.processes[-1].name
    why = outcome.why
    if first and outcome.process == plan.processes[-1].name:
        name += f", rank {first['rank']}" if plan.processes[-1].num_ranks > 1 else ""
        why = str(first["error"])
    log = plan.run_dir / "logs" / f"{outcome.process or plan.processes[-1].name}.log"
    lines = last_lines(log)
    meaning = meaning_of([*lines, why or ""])
    told = f"\n{name} {'hung' if outcome.status == 'hung' else 'failed'}" + (f": {why}" if why else "")
    told += f"\nLast lines of {log}:\n" + "".join(f"  | {line}\n" for line in lines)
    return told + (f"This usually means: {meaning}\n" if meaning and (first or {}).get("exit_code") != EXIT_USER else "")
