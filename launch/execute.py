"""Start a plan's processes, here or in containers, watch them, stop them together, and leave the record."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from launch import record
from launch.command_line.stream import drop
from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED, EXIT_USER, HostError
from launch.files import provenance, rundir
from launch.machine.detect import Host
from launch.plan import Plan, as_json, rank_config
from launch.planner import fit
from launch.runtimes import rocprof, sandbox, secret_files
from launch.runtimes.local import LocalProcess
from launch.runtimes.slurm_process import NodeProcess
from launch.schema.enums import Format, Preflight, Vendor
from launch.supervision import orphans
from launch.supervision.progress import Progress
from launch.supervision.supervise import Outcome, Started, Starter, describe, failures, supervise, worth_another
from launch.topology import Process

ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STATUS = {EXIT_DONE: "done", EXIT_INTERRUPTED: "interrupted", EXIT_HUNG: "hung"}


def check_host(plan: Plan, host: Host) -> dict[str, Any] | None:
    """The facts of the image, None without containers. Raises HostError where this machine, or this version, cannot run the plan.

    mode=plan does not ask.
    """
    config = plan.config
    vendor = config.hardware.vendor
    offer = "mode=plan shows what would run; smoke=true runs it small, on the CPU"
    if vendor != Vendor.none:
        here = host.gpus_of(vendor)
        needed = len({gpu for p in plan.processes for gpu in p.gpus})  # what prepares uses one that trains later
        beyond = sorted({gpu for p in plan.processes for gpu in p.gpus if gpu >= len(here)})
        if here and beyond and len(here) >= needed:
            raise HostError(f"GPU {beyond[0]} is asked for, and this machine has {len(here)}, from 0. Choose others in your mask.")
        if len(here) < needed:
            withheld = f" ({len(host.withheld)} more were not given to this container)" if host.withheld else ""
            raise HostError(
                f"hardware={config.hardware.name}: {needed} {vendor.name} GPU(s) needed, {len(here)} found here{withheld}. {offer}."
            )
    check_plan(plan)
    if config.runtime.slurm.nodes > 1 and "SLURM_JOB_ID" not in host.environ:
        raise HostError(f"a run on {config.runtime.slurm.nodes} nodes is started inside a job of Slurm, by launch/run.py runtime=slurm.")
    from launch.checks import preflight  # mode=plan does not need its imports, a twentieth of the time that it takes

    if config.runtime.on_node != "docker":
        rocprof.check(config)
        orphans.remove()
        check_sandbox(plan, host)
        preflight.check(plan, host)  # after those that hold GPU memory for a launcher that is gone
        return None
    from launch.runtimes import engine  # takes a quarter of a second to import, and only this runtime needs it

    secret_files.remove_orphans(host)
    check_sandbox(plan, host)
    image = engine.check(plan, host)
    preflight.check(plan, host)
    return image


def check_sandbox(plan: Plan, host: Host) -> None:
    """Raises HostError where the plan tests code and there is no engine, or no image, to do it in: never without."""
    if not sandbox.needed(plan.config):
        return
    from launch.runtimes import engine, sandboxed  # the engine's package, which most runs of runtime=local do without

    client = engine.connect_for("method.rewards.code_tests runs code in containers, under every runtime")
    sandboxed.image_id(client)
    with engine.told():
        engine.remove_orphans(client, host)


def check_plan(plan: Plan) -> None:
    """Raises HostError for what no machine of this kind can run."""
    lacking = fit.shortage(plan)
    if lacking and plan.config.preflight == Preflight.refuse:
        raise HostError(f"{lacking} The same command with mode=plan names changes that make it fit; preflight=warn starts it all the same.")
    if lacking:
        print(f"warning: {lacking}", file=sys.stderr)


def execute(
    plan: Plan,
    host: Host,
    image: dict[str, Any] | None,
    overrides: list[str],
    parent: str | None = None,
    stopping: list[int] | None = None,
) -> int:
    """Run the plan to its end. Returns the exit code; the run directory holds everything else.

    `image` is what check_host found. `stopping`: the caller's own `signals()`, where it has more to do than this run. Raises HostError
    where the engine refuses a container.
    """
    rundir.make(plan.run_dir)
    with rundir.locked(plan.run_dir), signals() if stopping is None else contextlib.nullcontext(stopping) as stopping:
        in_sandbox = _sandbox_image(plan)
        write_inputs(plan, overrides, in_sandbox)
        began = record.begin(plan, host, image, overrides, parent, in_sandbox)
        rundir.write_json(plan.run_dir / "record.json", began)
        secrets = sorted({name for spec in plan.containers.values() for name in spec.secrets})
        try:
            with secret_files.written(secrets, host, plan.run_dir), _guarded(plan), Progress(plan) as progress:
                outcome, restarts = supervise(plan, _starter(plan, host, image), progress, stopping)
        except HostError as error:
            failed = record.finish(began, plan.run_dir, "failed", error.exit_code, [], {"error": str(error)})
            rundir.write_json(plan.run_dir / "record.json", failed)
            raise
        result = rundir.read_json(plan.run_dir / "result.json")
        exit_code = _exit_code(plan, outcome, result or {})
        metrics = rundir.read_metrics(plan.run_dir / "metrics.jsonl")
        status = STATUS.get(exit_code, "failed")
        rundir.write_json(plan.run_dir / "record.json", record.finish(began, plan.run_dir, status, exit_code, metrics, result, restarts))
        if exit_code != EXIT_DONE and (outcome.status != "interrupted" or failures(plan.run_dir)):
            _tell(describe(plan, outcome), sys.stderr if plan.config.format == Format.json else sys.stdout)
    return exit_code


def write_inputs(plan: Plan, overrides: list[str], sandbox_image: str | None = None) -> None:
    """What a rank reads, and what a person does. Ranks know the sandbox's image by its id: verdicts are kept under it."""
    content = rank_config(plan, overrides) | ({"sandbox_image": sandbox_image} if sandbox_image else {})
    if plan.config.method.kind == "exporter":
        content["provenance"] = provenance.of(plan.config)
    rundir.write_text(plan.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(content)))
    rundir.write_json(plan.run_dir / "plan.json", as_json(plan))


def _sandbox_image(plan: Plan) -> str | None:
    """The id of the image that code is tested in; None where none is. Raises HostError."""
    if not sandbox.needed(plan.config):
        return None
    from launch.runtimes import engine, sandboxed  # as in check_sandbox

    return sandboxed.image_id(engine.connect())


def _starter(plan: Plan, host: Host, image: dict[str, Any] | None) -> Starter:
    if plan.config.runtime.slurm.nodes > 1:
        return lambda process, log: NodeProcess(plan.run_dir, process, log) if process.node else LocalProcess(process, log)
    if not plan.containers:
        return LocalProcess
    from launch.runtimes import contained, engine, sandboxed

    client = engine.connect()

    def start(process: Process, log: Path) -> Started:
        if process.kind == "verifier":
            return sandboxed.SandboxProcess(client, plan, process, host, log)
        if image is None:
            return LocalProcess(process, log)
        return contained.ContainedProcess(client, plan.containers[process.name], str(image["id"]), host, log)

    return start


def _guarded(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Containers need none: the engine keeps them, and the next start removes them by their labels."""
    in_containers = plan.config.runtime.on_node == "docker"
    return contextlib.nullcontext() if in_containers else orphans.guarded(plan.config.runtime.stop_timeout_s)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Signals that ask to stop are noted here and handled in the loop; the old handlers come back after.

    SIGHUP: a terminal that went away. SIGUSR1 and SIGUSR2: what schedulers are often told to send ahead of the time limit.
    """
    received: list[int] = []
    # What the caller has the launcher ignore (nohup) stays ignored.
    numbers = [n for n in ASKS_TO_STOP if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _exit_code(plan: Plan, outcome: Outcome, result: dict[str, Any]) -> int:
    """What the run amounts to."""
    if outcome.status == "interrupted":
        return EXIT_DONE if result.get("status") == "done" else EXIT_INTERRUPTED
    if outcome.status == "done":
        if result.get("status") == "done":
            return EXIT_DONE
        outcome.why = "it ended and left no result"
    if outcome.status == "hung":
        return EXIT_HUNG
    return EXIT_FAILED if worth_another(plan.run_dir) else EXIT_USER


def _tell(text: str, stream: TextIO) -> None:
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:  # nobody reads any more; the exit code and the record say it too
        drop(stream)
