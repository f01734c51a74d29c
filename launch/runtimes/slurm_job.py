"""What a job of Slurm starts on its nodes; job.sh calls it on the first, which starts it on the others.

python launch/runtimes/slurm_job.py RUN_DIR              the launcher: it executes the plan, watches it, and leaves the record
python launch/runtimes/slurm_job.py RUN_DIR PROCESS      on another node: becomes that node's torchrun
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from omegaconf import OmegaConf

from launch import record, show
from launch.environment import MASK
from launch.errors import EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.execute import check_host, execute
from launch.files import rundir
from launch.files.resuming import recorded_config
from launch.machine import detect
from launch.plan import ADDED, FILES, Plan, make_plan, prepare
from launch.runtimes import slurm_network
from launch.runtimes.slurm import MASKS, state_of
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.supervision import orphans


def composition(run_dir: Path) -> Config:
    """The composition as it was submitted. Raises UserError."""
    try:
        content: Any = OmegaConf.load(run_dir / "config.yaml")
    except OSError as error:
        raise UserError(f"{run_dir}/config.yaml: {error.strerror}. Every node of the job must see the run directory.") from error
    for added in ADDED:
        content.pop(added, None)
    content.data.pop(FILES, None)
    return recorded_config(content)


def take_mask(vendor: Vendor) -> None:
    """Slurm's mask of this node's GPUs under the one name that the launcher reads; nothing where it gives none."""
    os.environ.pop("HIP_VISIBLE_DEVICES", None)  # of the shell that submitted, or of the job's first node
    given = [os.environ.pop(name, "") for name in MASKS]
    chosen = next((mask for mask in given if re.fullmatch(r"\d+(,\d+)*", mask)), None)
    if chosen is not None and vendor in MASK:
        os.environ[MASK[vendor]] = chosen


def prepared(run_dir: Path) -> tuple[Plan, detect.Host]:
    """The plan of this node. Raises UserError and HostError."""
    config, warnings = prepare(composition(run_dir))
    take_mask(config.hardware.vendor)
    slurm = config.runtime.slurm
    if slurm.nodes > 1:
        here = slurm_network.address(slurm.interface)
        slurm_network.check_adapters(slurm)
        os.environ.setdefault("MASTER_ADDR", here)  # the first node's: the others inherit it
        os.environ.setdefault("MASTER_PORT", str(slurm_network.free_port(here)))
    host = detect.host(sys.executable)
    return make_plan(config, host, run_dir, warnings), host


def launch(run_dir: Path) -> int:
    """On the first node: the run from its plan to its exit code, and back into the queue where it was interrupted."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_CLUSTERS"):  # the last would have squeue and scontrol ask other clusters than this
        os.environ.pop(name, None)  # of the shell that submitted
    overrides = (rundir.read_json(run_dir / "record.json") or {}).get("overrides", [])
    before = newest_step(run_dir)
    forget_nodes(run_dir)
    sign(run_dir)
    try:
        plan, host = prepared(run_dir)
        image = check_host(plan, host)
        show.show_start(plan.config, plan, image, before > 0)
        exit_code = execute(plan, host, image, overrides)
    except (UserError, HostError) as error:
        _record_failure(run_dir, error)
        raise
    show.show_end(plan.config, plan, exit_code)
    if exit_code == EXIT_FAILED:
        say_missing(run_dir)
    if exit_code == EXIT_INTERRUPTED and plan.config.runtime.slurm.requeue:
        requeue(os.environ["SLURM_JOB_ID"], got_on=newest_step(run_dir) > before)
    return exit_code


def become(run_dir: Path, name: str) -> NoReturn:
    """On another node: torchrun in place of this program, once the node has shown that it can."""
    sign(run_dir)
    plan, host = prepared(run_dir)
    check_host(plan, host)
    process = next(p for p in plan.processes if p.name == name)
    print(f"{name} is on {node_name()}, job {os.environ.get('SLURM_JOB_ID')}", flush=True)
    os.execvpe(process.argv[0], process.argv, {**os.environ, **process.env, **orphans.mark(name)})


def newest_step(run_dir: Path) -> int:
    """Of the checkpoints; 0 where there is none."""
    return max((int(path.name.rpartition("-")[2]) for path in run_dir.glob("checkpoints/checkpoint-*[0-9]")), default=0)


def requeue(job: str, got_on: bool) -> None:
    """Back into the queue, unless somebody ended the job, Slurm requeues it itself, or it would be interrupted like this for ever."""
    try:
        ended = state_of(job) != "RUNNING"
    except HostError as error:  # the controller is busy; it may still take the job back
        print(f"{error}", flush=True)
        ended = False
    if ended:
        return
    if not got_on:
        print(f"job {job} is not requeued: interrupted before it saved anything new. Use: a longer runtime.slurm.time.", flush=True)
        return
    print(f"job {job} goes back into the queue, to go on from its newest checkpoint", flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode != 0:
        raise HostError(f"scontrol refuses to requeue job {job}: {done.stderr.strip()}. The same command as before resumes the run.")


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME", os.uname().nodename)


def sign(run_dir: Path) -> None:
    """This node has started, and sees the run directory."""
    folder = run_dir / "nodes"
    if run_dir.is_dir():  # else composition() says so
        folder.mkdir(exist_ok=True)
        (folder / node_name()).touch()


def forget_nodes(run_dir: Path) -> None:
    for file in (run_dir / "nodes").glob("*"):
        file.unlink()


def say_missing(run_dir: Path) -> None:
    """The nodes of the job that have left no sign."""
    listed = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True)
    missing = [name for name in listed.stdout.split() if not (run_dir / "nodes" / name).exists()]
    if missing:
        print(
            f"missing at the rendezvous: {', '.join(missing)}. Nothing of this run started there, or it does not see {run_dir}. "
            f"`scontrol show node {missing[0]}` says how it is; --exclude={missing[0]} in runtime.slurm.options leaves it out.",
            file=sys.stderr,
        )


def _record_failure(run_dir: Path, error: UserError | HostError) -> None:
    began = rundir.read_json(run_dir / "record.json")
    if began and began.get("status") != "failed":  # execute may have said it already
        failed = record.finish(began, run_dir, "failed", error.exit_code, [], {"error": str(error)})
        rundir.write_json(run_dir / "record.json", failed)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__)
        return UserError.exit_code
    # Before the launcher has its own handler, and after: nothing is lost then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    try:
        run_dir, *process = arguments
        return launch(Path(run_dir)) if not process else become(Path(run_dir), *process)
    except (UserError, HostError) as error:
        print(f"{node_name()}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
