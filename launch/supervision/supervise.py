"""Process groups started in order, watched, stopped together: the first failure, a hang or a signal ends all of them.

An attempt ends done, interrupted, failed or hung. Server and trainers share an attempt: a trainer that comes back needs a server
without the weights and the communicator of the one before.
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

from launch.errors import EXIT_USER
from launch.files import rundir
from launch.plan import Plan
from launch.supervision import logs, serving, watchdog
from launch.supervision.meaning import of as meaning_of
from launch.supervision.progress import Progress
from launch.supervision.watchdog import Watchdog
from launch.topology import Process

POLL_S = 0.2
ASK_EVERY_S = 1.0  # a question to a server in a container starts a program there
ASK_AFTER = 0.1  # of hang_timeout_s without a step: then the server is asked what it does
HUNG_GRACE_S = 15.0  # from SIGTERM to SIGKILL for what hangs: it saves nothing, or it would not have hung
SERVER_GRACE_S = 30.0  # the same for what serves: it saves nothing, and vLLM told to end as it loads waits for an engine that is gone
# The same for trainers whose server has failed, counted from the last step, micro-batch or saved byte: most wait for an answer that does
# not come, TRL's client for a minute and ranks in a collective for ever. As long as torchrun leaves ranks beside one that failed.
UNSERVED_GRACE_S = 30.0
SHOWN_LINES = 15
SERVE = ("server", "verifier")  # kinds that end when the others have, and not before
FAILURE = ("rank", "time", "error", "exit_code")  # what recipes/common/program.py writes


class Started(Protocol):
    """A process group that was started; LocalProcess and ContainedProcess are such."""

    def poll(self) -> int | None: ...
    def ask_to_stop(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def remove(self) -> None: ...
    def why(self) -> str | None: ...
    def ask(self, port: int, path: str) -> str: ...
    def dump_stacks(self, folder: Path) -> Path | None: ...


Starter = Callable[[Process, Path], Started]


@dataclass
class Outcome:
    """How an attempt ended: done, interrupted, failed or hung; at which process group, why, and at which byte of each log it began."""

    status: str
    process: str
    why: str | None = None
    began: dict[Path, int] = field(default_factory=dict)


@dataclass
class Group:
    """A process group that runs, with its logs by what stands before their lines, and what its server has said of itself."""

    process: Process
    started: Started
    followers: dict[str, logs.Follower]
    asked_at: float = 0.0
    tokens: float = 0.0

    def ask(self, path: str) -> str:
        """Of the server in it. Raises OSError."""
        assert self.process.port is not None
        return self.started.ask(self.process.port, path)

    def may_be_asked(self) -> bool:
        """Whether it is a server, and was not asked just now."""
        now = time.monotonic()
        if self.process.port is None or now - self.asked_at < ASK_EVERY_S:
            return False
        self.asked_at = now
        return True

    @property
    def num_said(self) -> int:
        return sum(follower.num_said for follower in self.followers.values())


@dataclass
class Attempt:
    """What is running, and since when nothing has got on."""

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
        """Start all in order, each when the one before is ready, and wait until the last has ended. Raises HostError."""
        try:
            for process in self.plan.processes:
                followers = self._followers(process)
                group = Group(process, start(process, group_log(self.plan, process)), followers)
                self.groups.append(group)
                outcome = self._until(functools.partial(self._ready, group))
                if outcome:
                    return outcome
            return self._until(self._finished) or self._ended(self.groups[-1], "done")
        finally:
            self._stop()

    def _followers(self, process: Process) -> dict[str, logs.Follower]:
        """Ranks first, then what their group says."""
        of_ranks = {f"rank {rank}": file for rank, file in rank_logs(self.plan, process).items()}
        return {
            name: logs.Follower(file, without_report=True)
            for name, file in {**of_ranks, process.name: group_log(self.plan, process)}.items()
        }

    def _until(self, reached: Callable[[], bool]) -> Outcome | None:
        while True:
            self._look()
            if self.stopping:  # before failures: a scheduler signals every process, and ranks end because they were told to
                return self._interrupted()
            failed = self._first_failure()
            if failed:
                return failed
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
        if not group.may_be_asked() or not serving.is_up(group.ask):
            return False
        try:
            serving.check(group.ask, self.plan.config, str(process.serves))
        except OSError:  # it has just ended, which the next look finds, or is busy
            return False
        self.progress.say("starting (imports and model)")
        return True

    def _finished(self) -> bool:
        all_started = len(self.groups) == len(self.plan.processes)
        return all_started and all(g.started.poll() == 0 for g in self.groups if g.process.kind not in SERVE)

    def _look(self) -> None:
        """Copy new log lines to the terminal."""
        for group in self.groups:
            ended = group.started.poll() is not None
            for name, follower in group.followers.items():
                self.progress.log(name, logs.without_stop(follower.lines(all_of_it=ended)))
        self.progress.update()

    def _ended(self, group: Group, status: str, why: str | None = None) -> Outcome:
        began = {follower.file: follower.began for each in self.groups for follower in each.followers.values()}
        return Outcome(status, group.process.name, why, began)

    def _first_failure(self) -> Outcome | None:
        """The servers stand first: trainers fail because their server did. One that ends when the trainers have finished did not fail."""
        for group in self.groups:
            code, is_server = group.started.poll(), group.process.kind in SERVE
            if code is None or (code == 0 and not is_server) or (is_server and self._finished()):
                continue
            result = rundir.read_json(self.plan.run_dir / "result.json") or {}
            if not is_server and result.get("status") == "interrupted":  # somebody told the ranks to stop, and not us
                return self._ended(group, "interrupted")
            if is_server:
                self.unserved = Watchdog(UNSERVED_GRACE_S, time.monotonic())
            return self._ended(group, "failed", group.started.why() or ("it ended by itself" if code == 0 else None))
        return None

    def _interrupted(self) -> Outcome:
        last = self.groups[-1]
        waits = f"at most {self._grace_of(last):g} s; another signal does not shorten it"
        does = "end" if last.process.kind in SERVE else "save and end"
        self.progress.note(f"{signal.Signals(self.stopping[0]).name}: waiting for {last.process.name} to {does} ({waits})")
        return self._ended(self.groups[-1], "interrupted")

    def _hung(self) -> bool:
        steps = watchdog.steps_done(self.plan.run_dir)
        self.begun = self.begun or steps != self.steps_before
        # Until training begins, what a log says for the first time is progress: a server that loads, a model that is drawn.
        loading = () if self.begun else tuple(group.num_said for group in self.groups)
        now = time.monotonic()
        if self.watchdog.quiet_s(now) > ASK_AFTER * self.watchdog.timeout_s:
            self.saved = watchdog.bytes_saved(self.plan.run_dir)
            for group in filter(Group.may_be_asked, self.groups):
                with contextlib.suppress(OSError):  # a server that does not answer has done nothing
                    group.tokens = max(group.tokens, watchdog.tokens(group.ask("/metrics")))
        return self.watchdog.hung((steps, loading, self.saved, *(group.tokens for group in self.groups)), now)

    def _dump_stacks(self) -> Outcome:
        quiet = self.watchdog.quiet_s(time.monotonic())
        why = f"no step, no token and no load progress for {quiet:.0f} s (runtime.hang_timeout_s)"
        self.progress.say("nothing gets on; taking the stacks of all processes")
        for group in self.groups:
            if group.started.poll() is None and group.process.kind != "verifier":  # which limits the time of what it runs
                name, log = group.process.name, group_log(self.plan, group.process)
                printed = log.with_name("rank*.log") if rank_logs(self.plan, group.process) else log
                try:
                    stacks = group.started.dump_stacks(self.plan.run_dir / "stacks") or printed
                    why += f"; stacks of {name} are in {stacks}"
                except OSError as error:
                    why += f"; stacks of {name} cannot be taken: {error}"
        self.grace_s = min(self.grace_s, HUNG_GRACE_S)
        return self._ended(self.groups[-1], "hung", why)

    def _stop(self) -> None:
        """SIGTERM, time to save, then SIGKILL to what is left. The last that started first: a server outlives those it serves."""
        deadline = time.monotonic() + self.grace_s
        with contextlib.ExitStack() as last_first:  # goes on to the next one whatever happens at one
            for group in self.groups:
                last_first.callback(self._end, group, deadline)
        self._look()

    def _grace_of(self, group: Group) -> float:
        return min(self.grace_s, SERVER_GRACE_S) if group.process.kind in SERVE else self.grace_s

    def _end(self, group: Group, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + self._grace_of(group))
        try:
            if group.started.poll() is None:
                group.started.ask_to_stop()
            while group.started.poll() is None and time.monotonic() < deadline and not self._waits_in_vain():
                group.started.wait(POLL_S)
                self._look()
        finally:
            group.started.remove()

    def _waits_in_vain(self) -> bool:
        """For a server that has failed."""
        if self.unserved is None:
            return False
        done = (watchdog.steps_done(self.plan.run_dir), watchdog.bytes_saved(self.plan.run_dir))
        return self.unserved.hung(done, time.monotonic())


def supervise(plan: Plan, start: Starter, progress: Progress, stopping: list[int]) -> tuple[Outcome, int]:
    """Attempts until one is done or interrupted, or runtime.max_restarts are used up. Returns the last, and how many restarts it took."""
    most = plan.config.runtime.max_restarts
    for restarts in range(most + 1):
        forget(plan.run_dir)
        outcome = Attempt(plan, progress, stopping).run(start)
        final = outcome.status in ("done", "interrupted") or bool(stopping) or not worth_another(plan.run_dir)
        if final or restarts == most:
            break
        progress.note(describe(plan, outcome))
        progress.say(f"restart {restarts + 1} of {most}, from the newest whole checkpoint")
    return outcome, restarts


def forget(run_dir: Path) -> None:
    """What an earlier attempt has left and would pass for this one's."""
    (run_dir / "result.json").unlink(missing_ok=True)
    for file in (run_dir / "failures").glob("*.json"):
        file.unlink()


def worth_another(run_dir: Path) -> bool:
    """Not where a rank refused what the user gave: it would refuse it again."""
    return all(failure["exit_code"] != EXIT_USER for failure in failures(run_dir))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """What ranks wrote as they failed, the first one first; one that was cut off in the middle is left out."""
    found = [rundir.read_json(file) or {} for file in sorted((run_dir / "failures").glob("*.json"))]
    whole = [f for f in found if all(key in f for key in FAILURE) and isinstance(f["time"], (int, float))]
    return sorted(whole, key=lambda f: f["time"])


def group_log(plan: Plan, process: Process) -> Path:
    """Of a process group: all that it says, but for ranks that have logs of their own."""
    return plan.run_dir / "logs" / f"{process.name}.log"


def rank_logs(plan: Plan, process: Process) -> dict[int, Path]:
    """Of each of its ranks, counted over all nodes (recipes/common/rank_log.py); none where one rank is all there is."""
    if process.kind in (*SERVE, "prepare") or process.num_ranks * plan.config.runtime.slurm.nodes == 1:
        return {}
    first = process.node * process.num_ranks
    return {rank: plan.run_dir / "logs" / f"rank{rank}.log" for rank in range(first, first + process.num_ranks)}


def describe(plan: Plan, outcome: Outcome) -> str:
    """Who failed first, why, the last lines of its log, and what they usually mean."""
    process = _failed_first(plan, outcome)
    log, of_ranks = group_log(plan, process), rank_logs(plan, process)
    words = logs.last_words(log, outcome.began.get(log, 0))
    rank, why, known = None, outcome.why, None
    if process.kind == "server":
        # vLLM's API server ends with 0 when its engine has died, hundreds of lines after the engine has said why.
        why = logs.root_cause(logs.last_words(log, outcome.began.get(log, 0), count=1000).lines) or why
    elif outcome.status != "hung" and process.kind != "verifier":
        known = next(iter(failures(plan.run_dir)), None)
        reported = None if words.rank is None else process.node * process.num_ranks + words.rank  # torchrun counts ranks of its node
        if words.exit_code is not None and words.exit_code < 0:  # it could write nothing, and others failed because of it
            rank, why = reported, logs.killed_by(-words.exit_code)
        elif known:
            rank, why = known["rank"], str(known["error"])
        elif words.exit_code is not None:
            rank, why = reported, f"exit code {words.exit_code}"
    name = process.name + (f", rank {rank}" if rank is not None and of_ranks else "")
    log, said = _spoken(outcome, log, of_ranks, rank)
    if (known or {}).get("exit_code") == EXIT_USER:  # its message says all
        return f"\n{name} failed: {why}\nEverything that it said is in {log}\n"
    shown = said[-SHOWN_LINES:]
    # Further up than is shown only where no rank has said what it died of: an old warning would explain everything.
    meaning = meaning_of([why or ""]) or meaning_of(shown) or (None if known else meaning_of(said))
    told = f"\n{name} {'hung' if outcome.status == 'hung' else 'failed'}" + (f": {why}" if why else "") + "\n"
    told += f"Last lines of {log}:\n" + ("".join(f"  | {line}\n" for line in shown) or "  (nothing)\n")
    return told + (f"This usually means: {meaning}\n" if meaning else "")


def _spoken(outcome: Outcome, log: Path, of_ranks: dict[int, Path], rank: int | None) -> tuple[Path, list[str]]:
    """The log to show and its last lines: the rank's, of a hang the first rank's, which tells the steps; then the group's.

    Where it is not known which rank failed, the group's comes first. A log without a word gives way to the other.
    """
    own = next(iter(of_ranks.values()), None) if rank is None else of_ranks.get(rank)
    files = [log, own] if rank is None and outcome.status != "hung" else [own, log]
    said = ((file, logs.last_words(file, outcome.began.get(file, 0)).lines) for file in files if file)
    return next((found for found in said if found[1]), (log, []))


def _failed_first(plan: Plan, outcome: Outcome) -> Process:
    """On several nodes every torchrun ends when one does: the rank that said so first tells which."""
    first = next(iter(failures(plan.run_dir)), None)
    if first and outcome.status != "hung" and plan.config.runtime.slurm.nodes > 1:
        return next(p for p in plan.processes if p.node == int(first["rank"]) // p.num_ranks)
    return next(p for p in plan.processes if p.name == outcome.process)
