"""Start a plan's processes, here or in containers, watch them, stop them together, and leave the record."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from launch import record, rundir, secret_files
from launch.detect import Host
from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, HostError
from launch.local import LocalProcess
from launch.plan import Plan, as_json, rank_config
from launch.progress import Progress
from launch.schema import Vendor
from launch.topology import Process

POLL_S = 0.2
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.*failed \(exitcode")
STATUS = {EXIT_DONE: "done", EXIT_INTERRUPTED: "interrupted"}


class Started(Protocol):
    """A process group that was started; LocalProcess and ContainedProcess are such."""

    def poll(self) -> int | None: ...
    def ask_to_stop(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def remove(self) -> None: ...
    def why(self) -> str | None: ...


Starter = Callable[[Process, Path], Started]


def check_host(plan: Plan, host: Host) -> dict[str, Any] | None:
    """The facts of the image, None under runtime=local. Raises HostError where this machine, or this version, cannot run the plan.

    mode=plan does not ask.
    """
    config = plan.config
    vendor = config.hardware.vendor
    offer = "mode=plan shows what would run; smoke=true runs it small, on the CPU"
    if vendor != Vendor.none:
        here = [gpu for gpu in host.gpus if (gpu.gfx.startswith("gfx")) == (vendor == Vendor.amd)]
        needed = sum(len(p.gpus) for p in plan.processes)
        if len(here) < needed:
            raise HostError(f"hardware={config.hardware.name}: {needed} {vendor.name} GPU(s) needed, {len(here)} found here. {offer}.")
    if len(plan.processes) > 1 or plan.processes[0].num_ranks > 1:
        raise HostError(f"topology={config.topology.name}: this version plans several GPUs and runs one. topology=single runs; {offer}.")
    if config.precision.compute == "fp8" or config.precision.weights == "nf4":
        raise HostError(f"precision={config.precision.name}: this version plans it and does not train in it yet. {offer}.")
    tight = [m for m in plan.memory if not m.fits and vendor != Vendor.none]
    if tight:
        m = tight[0]
        raise HostError(
            f"{m.process} on GPU {m.gpu}: {m.total_gb:.1f} GB estimated, {m.capacity_gb:g} GB there; "
            f"{m.total_gb - m.capacity_gb:.1f} GB missing. A smaller per_device_train_batch_size or max_length, "
            "gradient_checkpointing=true, adapter=lora, or more GPUs under topology=fsdp."
        )
    if config.runtime.name != "docker":
        return None
    from launch import engine  # takes a quarter of a second to import, and only this runtime needs it

    secret_files.remove_orphans(host)
    return engine.check(plan, host)


def execute(plan: Plan, host: Host, image: dict[str, Any] | None, overrides: list[str], parent: str | None = None) -> int:
    """Run the plan to its end. Returns the exit code; the run directory holds everything else.

    `image` is what check_host found. Raises HostError where the engine refuses a container.
    """
    rundir.make(plan.run_dir)
    with rundir.locked(plan.run_dir):
        _write_inputs(plan)
        began = record.begin(plan, host, image, overrides, parent)
        rundir.write_json(plan.run_dir / "record.json", began)
        secrets = sorted({name for spec in plan.containers.values() for name in spec.secrets})
        try:
            with secret_files.written(secrets, host, plan.run_dir):
                exit_code = _supervise(plan, host, image)
        except HostError as error:
            failed = record.finish(began, plan.run_dir, "failed", error.exit_code, [], {"error": str(error)})
            rundir.write_json(plan.run_dir / "record.json", failed)
            raise
        result = rundir.read_json(plan.run_dir / "result.json")
        metrics = rundir.read_metrics(plan.run_dir / "metrics.jsonl")
        status = STATUS.get(exit_code, "failed")
        rundir.write_json(plan.run_dir / "record.json", record.finish(began, plan.run_dir, status, exit_code, metrics, result))
    return exit_code


def _write_inputs(plan: Plan) -> None:
    rundir.write_text(plan.run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
    rundir.write_json(plan.run_dir / "plan.json", as_json(plan))
    (plan.run_dir / "result.json").unlink(missing_ok=True)  # of an earlier attempt: it would pass for this one's


def _supervise(plan: Plan, host: Host, image: dict[str, Any] | None) -> int:
    """Start all, wait for all; the first failure or a signal stops the rest."""
    stopping: list[int] = []
    running: list[tuple[Process, Started]] = []
    with _signals(stopping), Progress(plan) as progress:
        start = _starter(plan, host, image, progress)
        try:
            for process in plan.processes:
                running.append((process, start(process, plan.run_dir / "logs" / f"{process.name}.log")))
            failed = _wait(running, progress, stopping)
        finally:
            _stop([started for _, started in running], plan.config.runtime.stop_timeout_s)
        progress.update()
    return _exit_code(plan, failed, bool(stopping))


def _starter(plan: Plan, host: Host, image: dict[str, Any] | None, progress: Progress) -> Starter:
    if image is None:
        return LocalProcess
    from launch import contained, engine

    client, image_id = engine.connect(), str(image["id"])
    return lambda process, log: contained.ContainedProcess(client, plan.containers[process.name], image_id, host, log, progress.console)


@contextlib.contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP (a terminal that went away) are noted here and handled in the loop; the old handlers come back after."""
    # What the caller has the launcher ignore (nohup) stays ignored.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, lambda got, _frame: received.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait(running: list[tuple[Process, Started]], progress: Progress, stopping: list[int]) -> tuple[Process, Started] | None:
    """What failed first, or None when all ended well or a signal came."""
    while any(started.poll() is None for _, started in running):
        for process, started in running:
            if started.poll() not in (None, 0):
                return process, started
        if stopping:
            return None
        progress.update()
        time.sleep(POLL_S)
    return next((pair for pair in running if pair[1].poll() != 0), None)


def _stop(running: list[Started], grace_s: float) -> None:
    """SIGTERM, time to save, then SIGKILL to what is left. The last that started first: a server outlives those it serves."""
    deadline = time.monotonic() + grace_s
    for started in reversed(running):
        started.ask_to_stop()
        started.wait(max(0.0, deadline - time.monotonic()))
        started.remove()


def last_lines(log: Path, count: int = 15) -> list[str]:
    """What a process said last, before torchrun began to report on it."""
    with log.open(errors="replace") as file:
        said = itertools.takewhile(lambda line: not TORCHRUN_REPORT.search(line), file)
        return [line.rstrip("\n") for line in deque(said, maxlen=count)]


def _exit_code(plan: Plan, failed: tuple[Process, Started] | None, interrupted: bool) -> int:
    result: dict[str, Any] = rundir.read_json(plan.run_dir / "result.json") or {}
    if interrupted or result.get("status") == "interrupted":
        return EXIT_DONE if result.get("status") == "done" else EXIT_INTERRUPTED
    if failed is None and result.get("status") == "done":
        return EXIT_DONE
    process = failed[0] if failed else plan.processes[-1]
    why = result.get("error") or (failed and failed[1].why())
    log = plan.run_dir / "logs" / f"{process.name}.log"
    print(f"\n{process.name} failed" + (f": {why}" if why else "") + f"\nLast lines of {log}:")
    print("".join(f"  | {line}\n" for line in last_lines(log)), end="")
    return EXIT_USER if result.get("exit_code") == EXIT_USER else EXIT_FAILED
