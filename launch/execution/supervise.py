"""Start process groups in order, watch them, and stop them together.

A failure, a hang or a signal stops all groups. The outcome of an attempt is done, interrupted,
failed or hung. A restart replaces the server too, because the old one has stale weights and a
broken communicator.
"""

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
from launch.execution.meaning import explain
from launch.execution.progress_line import Progress
from launch.execution.watchdog import Watchdog
from launch.machine import placement
from launch.schema.plan import Plan, Process

POLL_S = 0.2
# Querying a server in a container starts a program there, so limit the rate.
QUERY_EVERY_S = 1.0
# Query the server's progress after this share of hang_timeout_s without a step.
QUERY_AFTER = 0.1
# Seconds from SIGTERM to SIGKILL. Hung processes and servers save nothing. vLLM ignores SIGTERM
# while it loads, because it waits for its engine.
HUNG_GRACE_S = 15.0
SERVER_GRACE_S = 30.0
SHOWN_LINES = 15
UNTRACED = ("verifier", "pause")  # kinds of processes whose stacks do not explain a hang
# Keys of failures/*.json, which recipes/rank/program.py writes.
FAILURE = ("rank", "time", "error", "exit_code")


class GroupHandle(Protocol):
    """A running process group, for example a LocalProcess or a ContainedProcess."""

    def poll(self) -> int | None:
        """Return the exit code; None while the group runs."""

    def terminate(self) -> None:
        """Send SIGTERM; every rank then saves and exits."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the group has exited, at most `timeout_s`."""

    def remove(self) -> None:
        """Kill all remaining processes of the group."""

    def end_reason(self) -> str | None:
        """Return why the kernel or the container engine killed the group, if it did."""

    def query(self, port: int, path: str) -> str:
        """Return the answer of the group's server. Raises OSError."""

    def dump_stacks(self, folder: Path) -> Path | None:
        """Dump the stacks of all processes; return their folder, or None if they are in the logs.

        Raises OSError.
        """


Starter = Callable[[Process, Path], GroupHandle]


@dataclass
class Outcome:
    """How and why an attempt ended, the process responsible, and each log's size at the start."""

    status: str
    process: str
    why: str | None = None
    log_offsets: dict[Path, int] = field(default_factory=dict)


@dataclass
class Group:
    """A running process group. `followers` maps the prefix of shown lines to a log."""

    process: Process
    handle: GroupHandle
    followers: dict[str, logs.Follower]
    queried_at: float = 0.0
    tokens: float = 0.0
    serves: bool = False  # whether its server has answered

    @property
    def is_server(self) -> bool:
        return self.process.kind in logs.SERVER_KINDS

    @property
    def is_running(self) -> bool:
        return self.handle.poll() is None

    def query(self, path: str) -> str:
        """Return the answer of the group's server. Raises OSError."""
        assert self.process.port is not None
        return self.handle.query(self.process.port, path)

    def may_query(self) -> bool:
        """Return whether the group has a server that was not queried in the last QUERY_EVERY_S."""
        now = time.monotonic()
        if self.process.port is None or now - self.queried_at < QUERY_EVERY_S:
            return False
        self.queried_at = now
        return True


@dataclass
class Attempt:
    """One attempt to run the plan: its running groups and their progress."""

    plan: Plan
    progress: Progress
    stopping: list[int]
    groups: list[Group] = field(default_factory=list)
    training_began: bool = False
    bytes_saved: int = 0

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.plan.config.runtime.hang_timeout_s, time.monotonic())
        self.steps_before = watchdog.steps_done(self.plan.run_dir)
        self.grace_s: float = self.plan.config.runtime.stop_timeout_s

    def run(self, start: Starter) -> Outcome:
        """Start all groups in order, wait for them, and return the outcome.

        Ranks load while their server loads. Raises HostError if a group cannot be started.
        """
        try:
            for process in self.plan.processes:
                log = logs.group_log(self.plan, process)
                # Show the ranks' logs before the log of their group.
                files = {f"rank {n}": f for n, f in logs.rank_logs(self.plan, process).items()}
                files[process.name] = log
                followers = {
                    name: logs.Follower(f, without_report=True) for name, f in files.items()
                }
                self.groups.append(group := Group(process, start(process, log), followers))
                if outcome := self._until(functools.partial(self._may_start_next, group)):
                    return outcome
            # Do not wait for a server that has exited. _first_failure reports it.
            return (
                self._until(lambda: all(self._serves(g) or not g.is_running for g in self.groups))
                or self._until(self._finished)
                or self._ended(self.groups[-1], "done")
            )
        finally:
            # Send SIGTERM, give processes time to save, then send SIGKILL. Stop the last group
            # first, so that a server outlives its trainers.
            deadline = time.monotonic() + self.grace_s
            with contextlib.ExitStack() as stack:  # continues if one of the calls raises
                for group in self.groups:
                    stack.callback(self._end, group, deadline)
            self._show_logs()

    def _until(self, condition: Callable[[], bool]) -> Outcome | None:
        """Wait for the condition, and return None; return an outcome if the attempt ends first."""
        while True:
            self._show_logs()
            # Check this before failures, because a scheduler signals the ranks too.
            if self.stopping:
                last, name = self.groups[-1], signal.Signals(self.stopping[0]).name
                self.progress.note(
                    f"{name}: waiting for {last.process.name} to "
                    f"{'exit' if last.is_server else 'save and exit'} "
                    f"(at most {self._stop_timeout(last):g} s; further signals have no effect)"
                )
                return self._ended(last, "interrupted")
            if failed := self._first_failure():
                return failed
            if condition():
                return None
            if self._hung():
                return self._dump_stacks()
            time.sleep(POLL_S)

    def _may_start_next(self, group: Group) -> bool:
        """Return whether the group after this one may start.

        A preparation must finish first. A server on the ranks' GPU must answer first, because vLLM
        fails if other processes change the free memory while it measures it.
        """
        if group.process.kind == "prepare":
            if group.handle.poll() != 0:
                return False
            remove_results(self.plan.run_dir)  # the preparation wrote another result.json
        return not placement.shares_gpu(self.plan.config) or self._serves(group)

    def _serves(self, group: Group) -> bool:
        """Return whether the group's server answers, or True if the group has no server."""
        if group.process.port is None or group.serves:
            return True
        self.progress.say(f"waiting for {group.process.name} to load and answer")
        with contextlib.suppress(OSError):  # the server is still loading, or has exited
            if group.may_query():
                group.query("/health")
                group.serves = True
                self.progress.say("starting (imports and model)")
        return group.serves

    def _finished(self) -> bool:
        """Return whether all groups other than servers have exited with code 0."""
        all_started = len(self.groups) == len(self.plan.processes)
        return all_started and all(g.handle.poll() == 0 for g in self.groups if not g.is_server)

    def _show_logs(self) -> None:
        """Copy new log lines to the terminal."""
        for group in self.groups:
            is_final = not group.is_running
            for name, follower in group.followers.items():
                lines = follower.lines(with_partial=is_final)
                self.progress.log(name, logs.without_stop_traceback(lines))
        self.progress.update()

    def _ended(self, group: Group, status: str, why: str | None = None) -> Outcome:
        followers = [f for each in self.groups for f in each.followers.values()]
        return Outcome(status, group.process.name, why, {f.file: f.start_offset for f in followers})

    def _first_failure(self) -> Outcome | None:
        """Return the first failure; servers come first, because trainers fail without them.

        A server may exit after the trainers have finished.
        """
        for group in self.groups:
            code = group.handle.poll()
            succeeded = self._finished() if group.is_server else code == 0
            if code is None or succeeded:
                continue
            result = json_files.read_json(self.plan.run_dir / "result.json") or {}
            if not group.is_server and result.get("status") == "interrupted":
                return self._ended(group, "interrupted")  # something else sent SIGTERM to the ranks
            early = "it exited with code 0 before the trainers" if code == 0 else None
            why = group.handle.end_reason() or early
            return self._ended(group, "failed", why)
        return None

    def _hung(self) -> bool:
        """Return whether nothing has progressed for runtime.hang_timeout_s."""
        steps, now = watchdog.steps_done(self.plan.run_dir), time.monotonic()
        self.training_began = self.training_began or steps != self.steps_before
        # Before training begins, new log lines show that a server or model is loading.
        followers = [f for group in self.groups for f in group.followers.values()]
        loading = () if self.training_began else tuple(len(f.distinct) for f in followers)
        if self.watchdog.quiet_s(now) > QUERY_AFTER * self.watchdog.timeout_s:
            self.bytes_saved = watchdog.bytes_saved(self.plan.run_dir)
            for group in filter(Group.may_query, self.groups):
                with contextlib.suppress(OSError):  # no answer means no progress
                    group.tokens = max(group.tokens, watchdog.tokens(group.query("/metrics")))
        tokens = tuple(group.tokens for group in self.groups)
        return self.watchdog.hung((steps, loading, self.bytes_saved, tokens), now)

    def _dump_stacks(self) -> Outcome:
        """Dump the stacks of a hung attempt and return its outcome."""
        quiet = self.watchdog.quiet_s(time.monotonic())
        why = f"no step, token or loading progress for {quiet:.0f} s (runtime.hang_timeout_s)"
        self.progress.say("no progress; dumping the stacks of all processes")
        # A verifier cannot hang, because it limits the time of its jobs, and a pause only sleeps.
        for group in (g for g in self.groups if g.is_running and g.process.kind not in UNTRACED):
            process, log = group.process, logs.group_log(self.plan, group.process)
            printed = log.with_name("rank*.log") if logs.rank_logs(self.plan, process) else log
            try:
                stacks = group.handle.dump_stacks(self.plan.run_dir / "stacks") or printed
                why += f"; stacks of {process.name} are in {stacks}"
            except OSError as error:
                why += f"; stacks of {process.name} could not be dumped: {error}"
        self.grace_s = min(self.grace_s, HUNG_GRACE_S)
        # If a server has not answered yet, blame it, because the ranks wait for it.
        loading = (g for g in self.groups if g.process.port is not None and not g.serves)
        return self._ended(next(loading, self.groups[-1]), "hung", why)

    def _stop_timeout(self, group: Group) -> float:
        """Return the seconds that the group has to exit after SIGTERM."""
        return min(self.grace_s, SERVER_GRACE_S) if group.is_server else self.grace_s

    def _end(self, group: Group, deadline: float) -> None:
        """Stop a group and show its last output. `deadline` is in monotonic seconds."""
        deadline = min(deadline, time.monotonic() + self._stop_timeout(group))
        try:
            if group.is_running:
                group.handle.terminate()
            while group.is_running and time.monotonic() < deadline:
                group.handle.wait(POLL_S)
                self._show_logs()
        finally:
            group.handle.remove()


def supervise(
    plan: Plan, start: Starter, progress: Progress, stopping: list[int]
) -> tuple[Outcome, int]:
    """Run an attempt, and restart it up to runtime.max_restarts times if it fails or hangs.

    Return the last outcome and the number of restarts.
    """
    limit = plan.config.runtime.max_restarts
    for restarts in range(limit + 1):
        remove_results(plan.run_dir)
        outcome = Attempt(plan, progress, stopping).run(start)
        is_final = outcome.status in ("done", "interrupted")
        if is_final or stopping or restarts == limit or not may_retry(plan.run_dir):
            break
        progress.note(describe(plan, outcome))
        progress.say(f"restart {restarts + 1} of {limit}, from the newest complete checkpoint")
    return outcome, restarts


def remove_results(run_dir: Path) -> None:
    """Remove result.json and failures/ of an earlier attempt."""
    (run_dir / "result.json").unlink(missing_ok=True)
    for file in (run_dir / "failures").glob("*.json"):
        file.unlink()


def may_retry(run_dir: Path) -> bool:
    """Return False if a rank rejected the user's input, because a restart cannot help."""
    return all(failure["exit_code"] != EXIT_USER for failure in failures(run_dir))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete failure reports of ranks, oldest first."""
    rows = [
        json_files.read_json(file) or {} for file in sorted((run_dir / "failures").glob("*.json"))
    ]
    complete = [row for row in rows if all(key in row for key in FAILURE)]
    timed = [row for row in complete if isinstance(row["time"], (int, float))]
    return sorted(timed, key=lambda row: row["time"])


def describe(plan: Plan, outcome: Outcome) -> str:
    """Return a message: which process failed first, why, its last lines, and their usual cause."""
    report = next(iter(failures(plan.run_dir)), None)
    process = next(p for p in plan.processes if p.name == outcome.process)
    hung = outcome.status == "hung"
    if report and not hung and plan.config.runtime.slurm.nodes > 1:
        # When one torchrun exits, all do, so show the node of the rank that failed first.
        trainers = (p for p in plan.processes if p.kind == process.kind)
        process = next(p for p in trainers if p.node == int(report["rank"]) // p.num_ranks)
    if hung or process.kind in logs.SERVER_KINDS:
        report = None
    log, rank_logs = logs.group_log(plan, process), logs.rank_logs(plan, process)
    offset = outcome.log_offsets.get(log, 0)
    tail = logs.tail(log, offset)
    rank, why = None, outcome.why
    if process.kind == "server":
        # The engine logs its error hundreds of lines before the API server exits with code 0.
        why = logs.root_cause(logs.tail(log, offset, count=1000).lines) or why
    elif not hung and process.kind != "verifier":
        # torchrun reports the rank's number on its node.
        reported = None if tail.rank is None else process.node * process.num_ranks + tail.rank
        if tail.exit_code is not None and tail.exit_code < 0:
            # A killed rank cannot write a report. Reports of other ranks are consequences.
            rank, why = reported, tail.end_reason
        elif report:
            rank, why = report["rank"], str(report["error"])
        elif tail.exit_code is not None:
            rank, why = reported, tail.end_reason
    name = process.name + (f", rank {rank}" if rank is not None and rank_logs else "")
    # Show the failed rank's log, or rank 0's in a hang. If it is unknown or its log is empty,
    # show the log of the process group.
    rank_log = next(iter(rank_logs.values()), None) if rank is None else rank_logs.get(rank)
    files = filter(None, [log, rank_log] if rank is None and not hung else [rank_log, log])
    last_lines = {file: logs.tail(file, outcome.log_offsets.get(file, 0)).lines for file in files}
    log, lines = next(((file, rows) for file, rows in last_lines.items() if rows), (log, []))
    if (report or {}).get("exit_code") == EXIT_USER:  # the message explains itself
        return f"\n{name} failed: {why}\nThe complete log is {log}\n"
    if error := json_files.write_error(plan.run_dir):  # even if the log has no room for the error
        unwritable = f"{plan.run_dir}: {error.strerror}"
        why = f"{why}; {unwritable}" if why else unwritable
    shown = lines[-SHOWN_LINES:]
    # Search earlier lines only without a report, because old warnings may match by accident.
    meaning = explain([why or ""], shown, [] if report else lines)
    verb, reason = "hung" if hung else "failed", f": {why}" if why else ""
    quoted = "".join(f"  | {line}\n" for line in shown) or "  (nothing)\n"
    usually = f"This usually means: {meaning}\n" if meaning else ""
    return f"\n{name} {verb}{reason}\nLast lines of {log}:\n{quoted}{usually}"
