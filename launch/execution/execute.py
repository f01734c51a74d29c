"""Run a plan: start its processes here or in containers, supervise them, and write the record."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.core import json_files
from launch.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HOST,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_USER,
    HostError,
    os_error_text,
)
from launch.execution import orphans, provenance, record, secret_files
from launch.execution.local import LocalProcess
from launch.execution.progress_line import Progress
from launch.execution.slurm_process import NodeProcess
from launch.execution.supervise import (
    Outcome,
    Started,
    Starter,
    describe,
    failures,
    supervise,
    worth_another,
)
from launch.machine import placement
from launch.machine.detect import Host
from launch.plan import rundir
from launch.plan.planning import rank_config
from launch.plan.views import as_json
from launch.schema.enums import Format, Preflight, Vendor
from launch.schema.plan import Plan, Process
from launch.search import fit

ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STATUS = {EXIT_DONE: "done", EXIT_INTERRUPTED: "interrupted", EXIT_HUNG: "hung"}


def check_host(plan: Plan, host: Host) -> dict[str, Any] | None:
    """Raise HostError if this machine cannot run the plan; mode=plan skips this.

    Return the facts of the image; None without containers.
    """
    config = plan.config
    check_gpus(plan, host)
    check_plan(plan)
    if config.runtime.slurm.nodes > 1 and "SLURM_JOB_ID" not in host.environ:
        raise HostError(
            f"runtime.slurm.nodes={config.runtime.slurm.nodes}: this run needs a Slurm job. "
            "Submit it with launch/run.py runtime=slurm."
        )
    # Imported here because it would make mode=plan 5% slower.
    from launch.checks import preflight

    # Check only after removing processes of dead launchers, which hold GPU memory.
    if config.runtime.on_node != "docker":
        orphans.remove()
        check_sandbox(plan, host)
        preflight.check(plan, host)
        return None
    # The import takes 0.25 s, and only containers need it.
    from launch.execution import docker_engine

    secret_files.remove_orphans(host)
    check_sandbox(plan, host)
    image = docker_engine.check(plan, host)
    preflight.check(plan, host)
    return image


def check_gpus(plan: Plan, host: Host) -> None:
    """Raise HostError if this machine lacks GPUs of the plan."""
    vendor = plan.config.hardware.vendor
    if vendor == Vendor.none:
        return
    # The preparation uses a GPU that later trains.
    count, gpus = len(host.gpus_of(vendor)), {gpu for p in plan.processes for gpu in p.gpus}
    if gpus <= set(range(count)):
        return
    withheld = f" ({len(host.withheld)} more were not passed to this container)"
    remedy = "mode=plan shows what would run; smoke=true runs it small, on the CPU."
    if count >= len(gpus):
        remedy = f"The run would use GPU {','.join(map(str, sorted(gpus)))}. Fix your mask."
    raise HostError(
        f"hardware={plan.config.hardware.name}: {len(gpus)} {vendor.name} GPU(s) needed, "
        f"{count} found here{withheld if host.withheld else ''}. {remedy}"
    )


def check_sandbox(plan: Plan, host: Host) -> None:
    """Raise HostError if the plan tests code but the engine or the image for that is missing."""
    if not placement.needs_sandbox(plan.config):
        return
    from launch.execution import docker_engine, sandboxed

    client = docker_engine.connect(
        "method.rewards.code_tests runs code in containers, under every runtime."
    )
    sandboxed.image_id(client)
    with docker_engine.host_errors():
        docker_engine.remove_orphans(client, host)


def check_plan(plan: Plan) -> None:
    """Raise HostError if no machine of this kind can run the plan."""
    shortage = fit.shortage(plan)
    if shortage and plan.config.preflight == Preflight.refuse:
        raise HostError(
            f"{shortage} The same command with mode=plan names changes that make it fit; "
            "preflight=warn starts it anyway."
        )
    if shortage:
        print(f"warning: {shortage}", file=sys.stderr)


def execute(
    plan: Plan,
    host: Host,
    image: dict[str, Any] | None,
    parent: str | None = None,
    stopping: list[int] | None = None,
) -> int:
    """Run the plan to its end and return the exit code; the run directory holds everything else.

    `image` is what check_host returned. `stopping` is the caller's own `signals()` if it does more
    than this run. Raises HostError if the engine rejects a container.
    """
    run_dir = plan.run_dir
    rundir.make(run_dir)
    with (
        rundir.locked(run_dir),
        signals() if stopping is None else contextlib.nullcontext(stopping) as stopping,
    ):
        sandbox_image = None
        if placement.needs_sandbox(plan.config):
            from launch.execution import docker_engine, sandboxed

            sandbox_image = sandboxed.image_id(docker_engine.connect())
        write_inputs(plan, sandbox_image)
        run_record = record.begin(plan, host, image, parent, sandbox_image)
        json_files.write_json(run_dir / "record.json", run_record)
        secrets = sorted({name for spec in plan.containers.values() for name in spec.secrets})
        # Containers need no guard: they outlive the launcher, and the next start removes them by
        # their labels.
        guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if plan.config.runtime.on_node != "docker":
            guard = orphans.guarded(plan.config.runtime.stop_timeout_s)
        try:
            with secret_files.written(secrets, host, run_dir), guard, Progress(plan) as progress:
                outcome, restarts = supervise(plan, starter(plan, host, image), progress, stopping)
        except (HostError, OSError) as error:
            why = os_error_text(error) if isinstance(error, OSError) else str(error)
            record.write_failure(run_record, run_dir, EXIT_HOST, why)
            raise HostError(why) from error
        result = json_files.read_json(run_dir / "result.json")
        code = exit_code(plan, outcome, result or {})
        metrics = json_files.read_metrics(run_dir / "metrics.jsonl")
        status = STATUS.get(code, "failed")
        final_record = record.finish(run_record, run_dir, status, code, metrics, result, restarts)
        json_files.write_json(run_dir / "record.json", final_record)
        if code != EXIT_DONE and (outcome.status != "interrupted" or failures(run_dir)):
            stream = sys.stderr if plan.config.format == Format.json else sys.stdout
            print(describe(plan, outcome), end="", file=stream, flush=True)
    return code


def write_inputs(plan: Plan, sandbox_image: str | None = None) -> None:
    """Write files for ranks and for people. Verdicts are kept under the sandbox image's id."""
    content = rank_config(plan)
    if sandbox_image:
        content["sandbox_image"] = sandbox_image
    if plan.config.method.exports:
        content["provenance"] = provenance.of(plan.config)
    json_files.write_text(
        plan.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(content))
    )
    json_files.write_json(plan.run_dir / "plan.json", as_json(plan))


def starter(plan: Plan, host: Host, image: dict[str, Any] | None) -> Starter:
    if plan.config.runtime.slurm.nodes > 1:
        return lambda process, log: (
            NodeProcess(plan.run_dir, process, log) if process.node else LocalProcess(process, log)
        )
    if not plan.containers:
        return LocalProcess
    from launch.execution import contained, docker_engine, sandboxed

    client = docker_engine.connect()

    def start(process: Process, log: Path) -> Started:
        if process.kind == "verifier":
            return sandboxed.SandboxProcess(client, plan, process, host, log)
        if image is None:
            return LocalProcess(process, log)
        return contained.ContainedProcess(
            client, plan.containers[process.name], str(image["id"]), host, log
        )

    return start


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect the signals that ask to stop, for the loop to handle; then restore the old handlers.

    SIGHUP comes from a terminal that closed, SIGUSR1 and SIGUSR2 from schedulers before the time
    limit.
    """
    received: list[int] = []
    # A signal that the caller made the launcher ignore (nohup) stays ignored.
    numbers = [n for n in ASKS_TO_STOP if signal.getsignal(n) != signal.SIG_IGN]
    old = {n: signal.signal(n, lambda number, _frame: received.append(number)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def exit_code(plan: Plan, outcome: Outcome, result: dict[str, Any]) -> int:
    is_done = result.get("status") == "done"
    if outcome.status == "interrupted":
        return EXIT_DONE if is_done else EXIT_INTERRUPTED
    if outcome.status == "done":
        if is_done:
            return EXIT_DONE
        outcome.why = "it ended without a result"
    if outcome.status == "hung":
        return EXIT_HUNG
    return EXIT_FAILED if worth_another(plan.run_dir) else EXIT_USER
