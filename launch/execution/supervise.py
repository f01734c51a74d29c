"""Start process groups in order, watch them, and stop them together.

A failure, a hang or a signal ends all of them. An attempt ends done, interrupted, failed or hung.
Server and trainers share an attempt, because restarted trainers need a server without the weights
and the communicator of the attempt before.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launch.core import json_files
from launch.core.errors import EXIT_USER
from launch.execution import logs, watchdog
from launch.execution.meaning import of as meaning_of
from launch.execution.progress_line import Progress
from launch.execution.watchdog import Watchdog
from launch.machine import placement
from launch.schema.plan import Plan, Process

POLL_S = 0.2
# Asking a server in a container starts a program there.
ASK_EVERY_S = 1.0
# Share of hang_timeout_s without a step after which the server is asked for its progress.
ASK_AFTER = 0.1
# From SIGTERM to SIGKILL. A hung process saves nothing, or it would not have hung. A server saves
# nothing either. If vLLM is stopped while it loads, it waits for an engine that has ended.
HUNG_GRACE_S = 15.0
SERVER_GRACE_S = 30.0
# The same for trainers whose server has failed, from their last step, micro-batch or saved byte.
# Most wait for an answer that does not come: TRL's client for a minute, ranks in a collective for
# ever. torchrun gives ranks the same time after one has failed.
UNSERVED_GRACE_S = 30.0
SHOWN_LINES = 15
# Keys that recipes/rank/program.py writes.
FAILURE = ("rank", "time", "error", "exit_code")


class Started(Protocol):
    """A started process group, for example a LocalProcess or a ContainedProcess."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def ask_to_stop(self) -> None:
        """Send SIGTERM; every rank then saves and ends."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the group has ended or the time is over."""

    def remove(self) -> None:
        """Kill what is left of the group."""

    def why(self) -> str | None:
        """Return how the operating system or engine ended the group; its log cannot show it."""

    def ask(self, port: int, path: str) -> str:
        """Return the answer of the group's server. Raises OSError."""

    def dump_stacks(self, folder: Path) -> Path | None:
        """Return the folder of its stacks; None if its processes print them into their logs.

        Raises OSError.
        """


Starter = Callable[[Process, Path], Started]


@dataclass
class Outcome:
    """How, where and why an attempt ended, and the byte at which each of its logs began."""

    status: str
    process: str
    why: str | None = None
    began: dict[Path, int] = field(default_factory=dict)


@dataclass
class Group:
    """A running process group, its logs by the prefix of their lines, and its server's state."""

    process: Process
    started: Started
    followers: dict[str, logs.Follower]
    asked_at: float = 0.0
    tokens: float = 0.0
    serves: bool = False  # its server has answered

    @property
    def is_server(self) -> bool:
        return self.process.kind in logs.SERVE

    @property
    def is_running(self) -> bool:
        return self.started.poll() is None

    def ask(self, path: str) -> str:
        """Return the answer of the group's server. Raises OSError."""
        assert self.process.port is not None
        return self.started.ask(self.process.port, path)

    def may_be_asked(self) -> bool:
        """Return whether the group is a server that was not asked recently."""
        now = time.monotonic()
        if self.process.port is None or now - self.asked_at < ASK_EVERY_S:
            return False
        self.asked_at = now
        return True


@dataclass
class Attempt:
    """The running groups, and how long they have made no progress."""

    plan: Plan
    progress: Progress
    stopping: list[int]
    groups: list[Group] = field(default_factory=list)
    begun: bool = False
    saved: int = 0

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.plan.config.runtime.hang_timeout_s, time.monotonic())
        self.steps_before = watchdog.steps_done(self.plan.run_dir)
        self.grace_s: float = self.plan.config.runtime.stop_timeout_s
        self.unserved: Watchdog | None = None

    def run(self, start: Starter) -> Outcome:
        """Start all groups in order, wait until the last has ended, and return the outcome.

        Ranks load while their server does. Raises HostError.
        """
        try:
            for process in self.plan.processes:
                log = logs.of_group(self.plan, process)
                # Ranks first, then the output of their group.
                files = {f"rank {n}": f for n, f in logs.of_ranks(self.plan, process).items()}
                files[process.name] = log
                followers = {
                    name: logs.Follower(f, without_report=True) for name, f in files.items()
                }
                self.groups.append(group := Group(process, start(process, log), followers))
                if outcome := self._until(functools.partial(self._lets_others_start, group)):
                    return outcome
            # A server that has ended never answers. _first_failure judges it.
            return (
                self._until(lambda: all(self._serves(g) or not g.is_running for g in self.groups))
                or self._until(self._finished)
                or self._ended(self.groups[-1], "done")
            )
        finally:
            # Send SIGTERM, give processes time to save, then send SIGKILL. The last started goes
            # first, so that a server outlives those that it serves.
            deadline = time.monotonic() + self.grace_s
            with contextlib.ExitStack() as last_first:  # continues if one of them raises
                for group in self.groups:
                    last_first.callback(self._end, group, deadline)
            self._look()

    def _until(self, reached: Callable[[], bool]) -> Outcome | None:
        while True:
            self._look()
            # Check this before failures: a scheduler signals every process, so ranks end on
            # request.
            if self.stopping:
                last, name = self.groups[-1], signal.Signals(self.stopping[0]).name
                self.progress.note(
                    f"{name}: waiting for {last.process.name} to "
                    f"{'end' if last.is_server else 'save and end'} "
                    f"(at most {self._grace_of(last):g} s; another signal does not shorten this)"
                )
                return self._ended(last, "interrupted")
            if failed := self._first_failure():
                return failed
            if reached():
                return None
            if self._hung():
                return self._dump_stacks()
            time.sleep(POLL_S)

    def _lets_others_start(self, group: Group) -> bool:
        """Return whether preparation has ended and a server on its ranks' GPU answers.

        vLLM refuses to start if others take or free memory while it measures how much is free.
        """
        if group.process.kind == "prepare":
            if group.started.poll() != 0:
                return False
            forget(self.plan.run_dir)  # its result would be taken for that of the ranks
        return not placement.shares_gpu(self.plan.config) or self._serves(group)

    def _serves(self, group: Group) -> bool:
        """Return whether the group's server, if any, answers."""
        if group.process.port is None or group.serves:
            return True
        self.progress.say(f"waiting for {group.process.name} to load and answer")
        with contextlib.suppress(OSError):  # it loads, or has ended, which the next look detects
            if group.may_be_asked():
                group.ask("/health")
                group.serves = True
                self.progress.say("starting (imports and model)")
        return group.serves

    def _finished(self) -> bool:
        all_started = len(self.groups) == len(self.plan.processes)
        return all_started and all(g.started.poll() == 0 for g in self.groups if not g.is_server)

    def _look(self) -> None:
        """Copy new log lines to the terminal."""
        for group in self.groups:
            is_final = not group.is_running
            for name, follower in group.followers.items():
                self.progress.log(name, logs.without_stop(follower.lines(all_of_it=is_final)))
        self.progress.update()

    def _ended(self, group: Group, status: str, why: str | None = None) -> Outcome:
        followers = [f for each in self.groups for f in each.followers.values()]
        return Outcome(status, group.process.name, why, {f.file: f.began for f in followers})

    def _first_failure(self) -> Outcome | None:
        """Return the first failure, servers before the trainers that fail because of them.

        A server that ends after the trainers have finished did not fail.
        """
        for group in self.groups:
            code = group.started.poll()
            ended_well = self._finished() if group.is_server else code == 0
            if code is None or ended_well:
                continue
            result = json_files.read_json(self.plan.run_dir / "result.json") or {}
            if not group.is_server and result.get("status") == "interrupted":
                return self._ended(group, "interrupted")  # something else stopped the ranks
            if group.is_server:
                self.unserved = Watchdog(UNSERVED_GRACE_S, time.monotonic())
            why = group.started.why() or ("it ended by itself" if code == 0 else None)
            return self._ended(group, "failed", why)
        return None

    def _hung(self) -> bool:
        steps, now = watchdog.steps_done(self.plan.run_dir), time.monotonic()
        self.begun = self.begun or steps != self.steps_before
        # Until training begins, new log lines count as progress: a server loads, or a model is
        # created.
        followers = [f for group in self.groups for f in group.followers.values()]
        loading = () if self.begun else tuple(len(follower.distinct) for follower in followers)
        if self.watchdog.quiet_s(now) > ASK_AFTER * self.watchdog.timeout_s:
            self.saved = watchdog.bytes_saved(self.plan.run_dir)
            for group in filter(Group.may_be_asked, self.groups):
                with contextlib.suppress(OSError):  # without an answer there is no progress
                    group.tokens = max(group.tokens, watchdog.tokens(group.ask("/metrics")))
        tokens = tuple(group.tokens for group in self.groups)
        return self.watchdog.hung((steps, loading, self.saved, tokens), now)

    def _dump_stacks(self) -> Outcome:
        quiet = self.watchdog.quiet_s(time.monotonic())
        why = f"no step, no token and no load progress for {quiet:.0f} s (runtime.hang_timeout_s)"
        self.progress.say("no progress; taking the stacks of all processes")
        # A verifier limits the time of the code that it runs.
        for group in (g for g in self.groups if g.is_running and g.process.kind != "verifier"):
            process, log = group.process, logs.of_group(self.plan, group.process)
            printed = log.with_name("rank*.log") if logs.of_ranks(self.plan, process) else log
            try:
                stacks = group.started.dump_stacks(self.plan.run_dir / "stacks") or printed
                why += f"; stacks of {process.name} are in {stacks}"
            except OSError as error:
                why += f"; stacks of {process.name} cannot be taken: {error}"
        self.grace_s = min(self.grace_s, HUNG_GRACE_S)
        # Ranks wait for a server that has not answered yet.
        loading = (g for g in self.groups if g.process.port is not None and not g.serves)
        return self._ended(next(loading, self.groups[-1]), "hung", why)

    def _grace_of(self, group: Group) -> float:
        return min(self.grace_s, SERVER_GRACE_S) if group.is_server else self.grace_s

    def _end(self, group: Group, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + self._grace_of(group))
        try:
            if group.is_running:
                group.started.ask_to_stop()
            while group.is_running and time.monotonic() < deadline:
                done = (
                    watchdog.steps_done(self.plan.run_dir),
                    watchdog.bytes_saved(self.plan.run_dir),
                )
                # Trainers make no progress after their server has failed.
                if self.unserved is not None and self.unserved.hung(done, time.monotonic()):
                    break
                group.started.wait(POLL_S)
                self._look()
        finally:
            group.started.remove()


def supervise(
    plan: Plan, start: Starter, progress: Progress, stopping: list[int]
) -> tuple[Outcome, int]:
    """Run attempts until one is done or interrupted, or runtime.max_restarts are used up.

    Return the last outcome and the number of restarts.
    """
    most = plan.config.runtime.max_restarts
    for restarts in range(most + 1):
        forget(plan.run_dir)
        outcome = Attempt(plan, progress, stopping).run(start)
        is_final = outcome.status in ("done", "interrupted")
        if is_final or stopping or restarts == most or not worth_another(plan.run_dir):
            break
        progress.note(describe(plan, outcome))
        progress.say(f"restart {restarts + 1} of {most}, from the newest whole checkpoint")
    return outcome, restarts


def forget(run_dir: Path) -> None:
    """Remove files of an earlier attempt that would pass for this one's."""
    (run_dir / "result.json").unlink(missing_ok=True)
    for file in (run_dir / "failures").glob("*.json"):
        file.unlink()


def worth_another(run_dir: Path) -> bool:
    """Return False if a rank rejected the user's input, because it would do so again."""
    return all(failure["exit_code"] != EXIT_USER for failure in failures(run_dir))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return what ranks wrote as they failed, the first failure first.

    Skip files that were cut off.
    """
    rows = [
        json_files.read_json(file) or {} for file in sorted((run_dir / "failures").glob("*.json"))
    ]
    whole = [row for row in rows if all(key in row for key in FAILURE)]
    return sorted(
        (row for row in whole if isinstance(row["time"], (int, float))), key=lambda row: row["time"]
    )


def describe(plan: Plan, outcome: Outcome) -> str:
    """Describe which process failed first, why, its last lines, and what they usually mean."""
    report = next(iter(failures(plan.run_dir)), None)
    process = next(p for p in plan.processes if p.name == outcome.process)
    hung = outcome.status == "hung"
    if report and not hung and plan.config.runtime.slurm.nodes > 1:
        # Every torchrun ends when one does, so take the node of the rank that failed first.
        process = next(p for p in plan.processes if p.node == int(report["rank"]) // p.num_ranks)
    if hung or process.kind in logs.SERVE:
        report = None
    log, of_ranks = logs.of_group(plan, process), logs.of_ranks(plan, process)
    began = outcome.began.get(log, 0)
    words = logs.last_words(log, began)
    rank, why = None, outcome.why
    if process.kind == "server":
        # vLLM's API server exits with 0 after its engine has died, hundreds of lines after the
        # engine logged why.
        why = logs.root_cause(logs.last_words(log, began, count=1000).lines) or why
    elif not hung and process.kind != "verifier":
        # torchrun counts the ranks of its node.
        reported = None if words.rank is None else process.node * process.num_ranks + words.rank
        if words.exit_code is not None and words.exit_code < 0:
            # A killed rank could write nothing, and others failed because of it.
            rank, why = reported, words.why
        elif report:
            rank, why = report["rank"], str(report["error"])
        elif words.exit_code is not None:
            rank, why = reported, words.why
    name = process.name + (f", rank {rank}" if rank is not None and of_ranks else "")
    # Show the failed rank's log, or rank 0's in a hang. If the rank is unknown, the group's
    # comes first. If one is empty, show the other.
    rank_log = next(iter(of_ranks.values()), None) if rank is None else of_ranks.get(rank)
    files = filter(None, [log, rank_log] if rank is None and not hung else [rank_log, log])
    last_lines = {file: logs.last_words(file, outcome.began.get(file, 0)).lines for file in files}
    log, lines = next(((file, rows) for file, rows in last_lines.items() if rows), (log, []))
    if (report or {}).get("exit_code") == EXIT_USER:  # its message is complete
        return f"\n{name} failed: {why}\nThe whole log is {log}\n"
    tail = lines[-SHOWN_LINES:]
    # Look further up only if no rank has written why it failed, because an old warning would match
    # too easily.
    meaning = meaning_of([why or ""], tail, [] if report else lines)
    verb, reason = "hung" if hung else "failed", f": {why}" if why else ""
    quoted = "".join(f"  | {line}\n" for line in tail) or "  (nothing)\n"
    usually = f"This usually means: {meaning}\n" if meaning else ""
    return f"\n{name} {verb}{reason}\nLast lines of {log}:\n{quoted}{usually}"
