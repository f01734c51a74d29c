"""Run a plan on the nodes of a Slurm job.

python launch/execution/slurm_job.py RUN_DIR            first node: executes and records the plan
python launch/execution/slurm_job.py RUN_DIR PROCESS    other nodes: starts torchrun for PROCESS
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from launch.core import stop_signals

if __name__ == "__main__":
    stop_signals.install()

import contextlib
import re
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import orphans, record, slurm_network
from launch.execution.execute import check_host, execute
from launch.execution.local import environment
from launch.execution.slurm import MASKS, call, state_of
from launch.machine import detect
from launch.machine.placement import MASK
from launch.plan import show
from launch.plan.planning import EXTRA_KEYS, FILES, make_plan, prepare
from launch.plan.resuming import recorded_config
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.plan import Plan


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
    host = detect.host(sys.executable)
    return make_plan(config, host, run_dir, warnings, request), host


def launch(run_dir: Path) -> int:
    """Execute the run on the first node, and requeue the job if it was interrupted."""
    # Drop the submitting shell's values: SLURM_CLUSTERS would redirect squeue and scontrol.
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_CLUSTERS"):
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
    if exit_code == EXIT_FAILED:
        with contextlib.suppress(HostError):  # the controller may not answer
            print_missing_nodes(run_dir)
    if exit_code == EXIT_INTERRUPTED and plan.config.runtime.slurm.requeue:
        requeue(os.environ["SLURM_JOB_ID"], newest_step(run_dir) > step_before)
    return exit_code


def exec_process(run_dir: Path, name: str) -> NoReturn:
    """Check this node, and replace this process with torchrun."""
    mark_started(run_dir)
    plan, host = node_plan(run_dir)
    check_host(plan, host)
    process = next(p for p in plan.processes if p.name == name)
    print(f"{name} is on {node_name()}, job {os.environ.get('SLURM_JOB_ID')}", flush=True)
    os.execvpe(process.argv[0], process.argv, {**environment(process), **orphans.mark(name)})


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is no checkpoint."""
    folders = run_dir.glob("checkpoints/checkpoint-*[0-9]")
    return max((int(folder.name.rpartition("-")[2]) for folder in folders), default=0)


def requeue(job: str, made_progress: bool) -> None:
    """Requeue the job unless it was cancelled or has saved no checkpoint this time."""
    try:
        if state_of(job) != "RUNNING":
            return
    except HostError as error:  # try to requeue even if squeue fails
        print(error, flush=True)
    if not made_progress:
        print(
            f"job {job} is not requeued, because it was interrupted before it saved a checkpoint. "
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


def print_missing_nodes(run_dir: Path) -> None:
    """Print the names of the job's nodes that have not called mark_started()."""
    hostnames = call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
    missing = [name for name in hostnames.split() if not (run_dir / "nodes" / name).exists()]
    if missing:
        print(
            f"missing nodes: {', '.join(missing)}. They did not start or cannot see {run_dir}. "
            f"`scontrol show node {missing[0]}` shows the state of a node. "
            f"runtime.slurm.options=[--exclude={missing[0]}] runs without it.",
            file=sys.stderr,
        )


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__)
        return UserError.exit_code
    try:
        run_dir, *process = arguments
        return exec_process(Path(run_dir), *process) if process else launch(Path(run_dir))
    except (UserError, HostError) as error:
        print(f"{node_name()}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
