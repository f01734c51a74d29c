"""Run a plan: start its processes here or in containers, supervise them, and write the record."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.core import json_files, stop_signals
from launch.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HOST,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_USER,
    REMEDIES,
    HostError,
    UserError,
    os_error_text,
)
from launch.execution import apptainer, mounted, orphans, provenance, record, secret_files
from launch.execution.local import LocalProcess
from launch.execution.progress_line import Progress
from launch.execution.slurm_process import NodeProcess, PyxisProcess, check_pyxis, step
from launch.execution.supervise import (
    GroupHandle,
    Outcome,
    Starter,
    describe,
    failures,
    may_retry,
    supervise,
)
from launch.machine import placement
from launch.machine.detect import Host
from launch.plan import inherited, local_python, rundir, tools
from launch.plan.planning import rank_config, with_commits
from launch.plan.views import as_json
from launch.schema.enums import Format, Preflight, Vendor
from launch.schema.plan import Plan, Process
from launch.schema.trainer_args import value_or_none
from launch.search import fit

RESERVED, RESERVED_BYTES = ".reserved", 2**20  # for the final record, which is about 0.1 MB
STATUS = {EXIT_DONE: "done", EXIT_INTERRUPTED: "interrupted", EXIT_HUNG: "hung"}


def check_host(plan: Plan, host: Host) -> dict[str, Any] | None:
    """Raise HostError if this machine cannot run the plan.

    Return the facts of its container image, or None if it runs without containers.
    """
    config = plan.config
    inherited.check_copies(host.environ)
    check_gpus(plan, host)
    check_port(plan, host)
    check_plan(plan)
    if config.runtime.slurm.nodes > 1 and "SLURM_JOB_ID" not in host.environ:
        raise HostError(
            f"runtime.slurm.nodes={config.runtime.slurm.nodes}: several nodes need a Slurm job. "
            "Use runtime=slurm to submit one."
        )
    # At the top of the file, this import would make mode=plan 5% slower.
    from launch.checks import preflight

    problems = "\n".join(local_python.problems(config, host))
    if problems and config.preflight == Preflight.refuse:
        raise HostError(f"{problems} preflight=warn starts it anyway.")
    on_node, image = config.runtime.on_node, None
    # First remove processes of dead launchers, because they occupy GPU memory.
    if on_node != "docker":
        orphans.remove()
    if on_node in ("docker", "apptainer"):
        secret_files.remove_orphans(host)
    check_sandbox(plan, host)
    if on_node == "docker":
        # The import takes 0.25 s, so runs without containers skip it.
        from launch.execution import docker_engine

        image = docker_engine.check(plan, host)
    elif on_node == "apptainer":
        image = apptainer.check(plan, host)
    elif on_node == "pyxis":
        image = check_pyxis(config)
    else:
        inherited.check_tmpdir(config, host.environ)
        check_tools(plan, host)
    preflight.check(plan, host)
    return image


def check_gpus(plan: Plan, host: Host) -> None:
    """Raise HostError if the plan uses GPUs that this machine does not have."""
    vendor = plan.config.hardware.vendor
    if vendor == Vendor.none:
        return
    # Collect GPUs in a set, because the preparation and a rank share one.
    count, gpus = len(host.gpus_of(vendor)), {gpu for p in plan.processes for gpu in p.gpus}
    if gpus <= set(range(count)):
        return
    withheld = f" ({len(host.withheld)} more were not passed to this container)"
    remedy = "smoke=true runs a tiny version on the CPU; mode=plan only shows the plan."
    if vendor == Vendor.amd and count + len(host.withheld) >= len(gpus) > count:
        start = "docker run --device /dev/kfd --device /dev/dri ..."
        remedy = f"To pass them, start this container with: {start} Without them: {remedy}"
    if count >= len(gpus):
        numbers = ",".join(map(str, sorted(gpus)))
        remedy = f"Your mask selects GPU {numbers}. Fix {placement.MASK[vendor]}."
    raise HostError(
        f"hardware={plan.config.hardware.name}: {len(gpus)} {vendor.name} GPU(s) needed, "
        f"{count} found here{withheld if host.withheld else ''}. {remedy}"
    )


def check_tools(plan: Plan, host: Host) -> None:
    """Raise HostError if this machine lacks a program that the plan needs."""

    def run(argv: list[str]) -> str:
        argv = [host.python, *argv[1:]]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    tools.check(plan.config, run)


def check_port(plan: Plan, host: Host) -> None:
    """Raise HostError if another program listens on the port of method=serve."""
    port = value_or_none(plan.config, "port") if plan.config.method.kind == "service" else None
    if port in host.listening:
        raise HostError(
            f"method.args.port={port}: another program listens on this port. Use: "
            f"method.args.port={host.free_port(int(port) + 1)}."
        )


def check_sandbox(plan: Plan, host: Host) -> None:
    """Raise HostError if the plan tests code without a container engine or the sandbox image."""
    if not placement.needs_sandbox(plan.config):
        return
    from launch.execution import docker_engine, sandboxed

    client = docker_engine.connect(
        "method.rewards.code_tests always needs a container engine, even with runtime=local."
    )
    docker_engine.check_limits(client, plan)
    sandboxed.image_id(client)
    with docker_engine.host_errors():
        docker_engine.remove_orphans(client, host)


def check_plan(plan: Plan) -> None:
    """Raise HostError if the plan exceeds the memory of its GPUs or hosts."""
    shortage = fit.shortage(plan)
    if shortage and plan.config.preflight == Preflight.refuse:
        raise HostError(
            f"{shortage} mode=plan lists changes that make it fit; preflight=warn starts it anyway."
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
    """Run the plan to its end and return the exit code.

    `image` is the result of check_host. A caller of several runs passes `stopping`, the signals
    that it collects. Raises HostError if a process or container cannot be created.
    """
    plan, run_dir = with_commits(plan, host), plan.run_dir
    rundir.make(run_dir)
    with (
        rundir.locked(run_dir),
        reserved_space(run_dir / RESERVED) as release,
        signals() if stopping is None else contextlib.nullcontext(stopping) as stopping,
    ):
        # Another launcher may have finished the run since this one chose it.
        if (json_files.read_json(run_dir / "record.json") or {}).get("status") == "done":
            raise UserError(f"{run_dir}: this run is done. Use resume=never for another run.")
        sandbox_image = None
        if placement.needs_sandbox(plan.config):
            from launch.execution import docker_engine, sandboxed

            sandbox_image = sandboxed.image_id(docker_engine.connect())
        write_inputs(plan, sandbox_image)
        run_record = record.begin(plan, host, image, parent, sandbox_image)
        json_files.write_json(run_dir / "record.json", run_record)
        # pyxis passes them as variables.
        as_files = plan.containers.values() if plan.config.runtime.on_node != "pyxis" else ()
        secrets = sorted({name for spec in as_files for name in spec.secrets})
        # Containers need no guard, because the next launcher removes them by their labels.
        guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if plan.config.runtime.on_node != "docker":
            guard = orphans.guarded(plan.config.runtime.stop_timeout_s)
        try:
            with secret_files.written(secrets, host, run_dir), guard, Progress(plan) as progress:
                outcome, restarts = supervise(plan, starter(plan, host, image), progress, stopping)
        except (HostError, OSError) as error:
            why = os_error_text(error) if isinstance(error, OSError) else str(error)
            release()
            with contextlib.suppress(OSError):  # the same error
                record.write_failure(run_record, run_dir, EXIT_HOST, why)
            raise HostError(why) from error
        result = json_files.read_json(run_dir / "result.json")
        code = exit_code(plan, outcome, result or {})
        metrics = json_files.read_metrics(run_dir / "metrics.jsonl")
        status = STATUS.get(code, "failed")
        has_failed = code != EXIT_DONE and (outcome.status != "interrupted" or failures(run_dir))
        description = describe(plan, outcome) if has_failed else ""
        run_record |= {"failure": description.strip()} if description else {}
        final_record = record.finish(run_record, run_dir, status, code, metrics, result, restarts)
        # Before the record, which a disk that became read-only cannot hold.
        stream = sys.stderr if plan.config.format == Format.json else sys.stdout
        print(description, end="", file=stream, flush=True)
        release()
        json_files.write_json(run_dir / "record.json", final_record)
    return code


@contextlib.contextmanager
def reserved_space(file: Path) -> Iterator[Callable[[], None]]:
    """Reserve disk space in `file`; yield a function that releases it for the final record.

    Otherwise a run that fills the disk could not record its failure. Raises OSError.
    """

    def release() -> None:
        with contextlib.suppress(OSError):  # writing the record reports what is wrong
            file.unlink()

    try:
        with file.open("wb") as space:
            try:
                os.posix_fallocate(space.fileno(), 0, RESERVED_BYTES)
            except OSError as error:
                error.filename = str(file)
                if error.errno in REMEDIES:  # others mean that the file system cannot reserve
                    raise
        yield release
    finally:
        release()


def write_inputs(plan: Plan, sandbox_image: str | None = None) -> None:
    """Write config.yaml for the ranks and plan.json for the user.

    Ranks cache verdicts on code by the id of the sandbox image.
    """
    content = rank_config(plan)
    if sandbox_image:
        content["sandbox_image"] = sandbox_image
    if plan.config.method.exports:
        content["provenance"] = provenance.of(plan.config)
    json_files.write_text(
        plan.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(content))
    )
    json_files.write_json(plan.run_dir / "plan.json", as_json(plan))


def starter(plan: Plan, host: Host, image: dict[str, Any] | None, here: int = 0) -> Starter:
    """Return a function that starts a process group on its node; this one has the number `here`."""
    if any(not spec.prefix for spec in plan.containers.values()):
        from launch.execution import contained, docker_engine, sandboxed

        client = docker_engine.connect()

    def start(process: Process, log: Path) -> GroupHandle:
        spec = plan.containers.get(process.name)
        if process.kind == "verifier":
            return sandboxed.SandboxProcess(client, plan, process, host, log)
        if plan.config.runtime.on_node == "pyxis" and spec:
            return PyxisProcess(mounted.on_host(process, spec), log)
        if process.node != here:
            return NodeProcess(step(plan.run_dir, process), log)
        if spec is None or image is None:
            return LocalProcess(process, log)
        if spec.prefix:
            return apptainer.ApptainerProcess(mounted.on_host(process, spec), log)
        return contained.ContainedProcess(client, spec, str(image["id"]), host, log)

    return start


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect stop signals in a list instead of acting on them."""
    received: list[int] = []
    try:
        with handling(received.append):
            yield received
    finally:
        stop_signals.has_started = True


@contextlib.contextmanager
def handling(handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle` with the number of each stop signal; restore the handlers at the end."""
    old = {
        number: signal.signal(number, lambda number, _frame: handle(number))
        for number in stop_signals.handled()
    }
    try:
        yield
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
        outcome.why = "it exited without writing result.json"
    if outcome.status == "hung":
        return EXIT_HUNG
    return EXIT_FAILED if may_retry(plan.run_dir) else EXIT_USER
