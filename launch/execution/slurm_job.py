"""Run a plan on the nodes of a Slurm job.

python launch/execution/slurm_job.py RUN_DIR            first node: executes and records the plan
python launch/execution/slurm_job.py RUN_DIR PROCESS    other nodes: starts torchrun for PROCESS
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from launch.core import stop_signals

if __name__ == "__main__":
    stop_signals.install()

import contextlib
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.config.request import Request
from launch.core import json_files
from launch.core.console import run_program
from launch.core.errors import EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import orphans, record, secret_files, slurm_network
from launch.execution.execute import check_host, execute, signals, starter
from launch.execution.local import environment
from launch.execution.slurm import MASKS, call, state_of
from launch.machine import detect, placement
from launch.machine.placement import MASK
from launch.plan import show
from launch.plan.planning import EXTRA_KEYS, FILES, make_plan, prepare
from launch.plan.process_groups import SERVER
from launch.plan.resuming import recorded_config
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.plan import Plan

# A node that does not start a step within this time is dead. Slurm itself waits SlurmdTimeout
# (300 s by default), and ranks on the other nodes fail long before.
NODE_ANSWERS_S = 60.0
# restarts of a job whose nodes die before it saves a checkpoint
MAX_FUTILE_RESTARTS = 3


def composition(run_dir: Path) -> Config:
    """Return the composition of the submitted run. Raises UserError if config.yaml is missing."""
    try:
        content: Any = OmegaConf.load(run_dir / "config.yaml")
    except OSError as error:
        raise UserError(
            f"{run_dir}/config.yaml: {error.strerror}. Every node of the job must see the run "
            "directory."
        ) from error
    for key in EXTRA_KEYS:
        content.pop(key, None)
    content.data.pop(FILES, None)
    return recorded_config(content)


def adopt_mask(vendor: Vendor) -> None:
    """Move Slurm's mask of this node's GPUs into the variable that the launcher reads."""
    # Slurm did not set this variable. It comes from the submitting shell or the first node.
    os.environ.pop("HIP_VISIBLE_DEVICES", None)
    masks = [os.environ.pop(name, "") for name in MASKS]
    mask = next((mask for mask in masks if re.fullmatch(r"\d+(,\d+)*", mask)), None)
    if mask is not None and vendor in MASK:
        os.environ[MASK[vendor]] = mask


def node_plan(run_dir: Path) -> tuple[Plan, detect.Host]:
    """Make the run's plan for this node; return it with the host. Raises UserError, HostError."""
    config, warnings = prepare(composition(run_dir))
    record = json_files.read_json(run_dir / "record.json") or {}
    request = Request(record.get("overrides", ()))
    adopt_mask(config.hardware.vendor)
    slurm = config.runtime.slurm
    if slurm.nodes > 1:
        address = slurm_network.address(slurm.interface)
        slurm_network.check_adapters(slurm)
        # The first node sets these for all nodes, which inherit them through srun.
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(slurm_network.free_port(address)))
    if placement.serves_apart(config) and SERVER not in os.environ:
        step = ["srun", "--nodes=1", "--ntasks=1", f"--relative={slurm.nodes - 1}"]
        program = [sys.executable, slurm_network.__file__, *filter(None, [slurm.interface])]
        os.environ[SERVER] = call(*step, "--cpu-bind=none", *program).split()[-1]
    host = detect.host(sys.executable)
    return make_plan(config, host, run_dir, warnings, request), host


def launch(run_dir: Path) -> int:
    """Execute the run on the first node, and requeue the job if it was interrupted."""
    # Drop the submitting shell's values: SLURM_CLUSTERS would redirect squeue and scontrol.
    for name in ("MASTER_ADDR", "MASTER_PORT", SERVER, "SLURM_CLUSTERS"):
        os.environ.pop(name, None)
    step_before = newest_step(run_dir)
    for file in (run_dir / "nodes").glob("*"):  # from an earlier job
        file.unlink()
    mark_started(run_dir)
    try:
        plan, host = node_plan(run_dir)
        image = check_host(plan, host)
        show.show_start(plan.config, plan, image, step_before > 0)
        exit_code = execute(plan, host, image)
    except (UserError, HostError) as error:
        run_record = json_files.read_json(run_dir / "record.json")
        # execute() may have recorded the failure, and it rejects a run that is done.
        if run_record and run_record.get("status") not in ("failed", "done"):
            record.write_failure(run_record, run_dir, error.exit_code, str(error))
        raise
    show.show_end(plan.config, plan, exit_code)
    slurm, is_lost = plan.config.runtime.slurm, False
    if exit_code in (EXIT_FAILED, EXIT_HUNG) and slurm.nodes > 1:
        with contextlib.suppress(HostError):  # the controller may not answer
            is_lost = report_nodes(plan)
    if slurm.requeue and (exit_code == EXIT_INTERRUPTED or is_lost):
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        made_progress = newest_step(run_dir) > step_before
        requeue(
            os.environ["SLURM_JOB_ID"],
            made_progress or (is_lost and restarts < MAX_FUTILE_RESTARTS),
        )
    return exit_code


def run_process(run_dir: Path, name: str) -> int:
    """Check this node and run a process there; without a container, in place of this one."""
    mark_started(run_dir)
    plan, host = node_plan(run_dir)
    image = check_host(plan, host)
    process = next(p for p in plan.processes if p.name == name)
    print(f"{name} is on {node_name()}, job {os.environ.get('SLURM_JOB_ID')}", flush=True)
    if image is None:
        variables = {**environment(process), **orphans.mark(name)}
        return os.execvpe(process.argv[0], process.argv, variables)
    secrets = plan.containers[name].secrets
    with secret_files.written(secrets, host, run_dir), signals() as stopping:
        group = starter(plan, host, image, process.node)(process, Path("/dev/stdout"))
        signal.signal(signal.SIGUSR1, lambda *_: group.dump_stacks(run_dir / "stacks"))
        try:
            while not stopping and group.poll() is None:
                group.wait(1.0)
            if stopping:
                group.terminate()
                group.wait(plan.config.runtime.stop_timeout_s)
        finally:
            group.remove()
    return group.poll() or 0


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is no checkpoint."""
    folders = run_dir.glob("checkpoints/checkpoint-*[0-9]")
    return max((int(folder.name.rpartition("-")[2]) for folder in folders), default=0)


def requeue(job: str, may_repeat: bool) -> None:
    """Requeue the job unless it was cancelled or would only repeat what failed."""
    try:
        if state_of(job) != "RUNNING":
            return
    except HostError as error:  # try to requeue even if squeue fails
        print(error, flush=True)
    if not may_repeat:
        print(
            f"job {job} is not requeued, because it stopped before it saved a checkpoint. "
            "Increase runtime.slurm.time, or save more often with method.args.save_steps=N.",
            flush=True,
        )
        return
    print(f"requeueing job {job}, which will resume from its newest checkpoint", flush=True)
    call("scontrol", "requeue", job)


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME", os.uname().nodename)


def mark_started(run_dir: Path) -> None:
    """Write a file that shows that this node has started and can see the run directory."""
    if run_dir.is_dir():  # composition() reports a missing directory
        (run_dir / "nodes").mkdir(exist_ok=True)
        (run_dir / "nodes" / node_name()).touch()


def report_nodes(plan: Plan) -> bool:
    """Print which nodes are dead or missing; return whether any is dead."""
    names = call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    dead = dead_nodes(names) if plan.config.runtime.slurm.requeue else []
    missing = [name for name in names if not (plan.run_dir / "nodes" / name).exists()]
    if plan.config.runtime.on_node == "pyxis":  # only the first node runs this program
        missing = []
    if dead:
        print(f"dead nodes: {', '.join(dead)}. They start no step of this job.", file=sys.stderr)
    elif missing:
        print(
            f"missing nodes: {', '.join(missing)}. They did not start or cannot see "
            f"{plan.run_dir}. `scontrol show node {missing[0]}` shows the state of a node. "
            f"runtime.slurm.options=[--exclude={missing[0]}] runs without it.",
            file=sys.stderr,
        )
    return bool(dead)


def dead_nodes(names: list[str]) -> list[str]:
    """Return the nodes on which no step of this job starts."""
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
    probes = {
        name: subprocess.Popen([*step, f"--nodelist={name}", "true"], stderr=subprocess.DEVNULL)
        for name in names
    }
    deadline = time.monotonic() + NODE_ANSWERS_S
    for child in probes.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
    dead = [name for name, child in probes.items() if child.poll() != 0]
    for child in probes.values():
        child.kill()
    return dead


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__)
        return UserError.exit_code
    try:
        run_dir, *process = arguments
        return run_process(Path(run_dir), *process) if process else launch(Path(run_dir))
    except (UserError, HostError) as error:
        print(f"{node_name()}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    run_program(main)
