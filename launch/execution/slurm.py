"""Write a job script into the run directory and submit it with sbatch (runtime=slurm)."""

import json
import os
import shlex
import subprocess
import sys
import time

from launch.core import json_files
from launch.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HOST,
    EXIT_INTERRUPTED,
    HostError,
    UserError,
)
from launch.execution import apptainer, record
from launch.execution.execute import check_plan, signals, write_inputs
from launch.execution.logs import Follower
from launch.execution.slurm_process import JOB_PROGRAM, check_pyxis
from launch.machine.detect import Host
from launch.machine.placement import MASK, num_gpus
from launch.plan import inherited, rundir, sealed, show
from launch.plan.planning import with_commits
from launch.schema import Slurm
from launch.schema.enums import Format, Vendor
from launch.schema.plan import Plan

# Files in the run directory.
SCRIPT, JOB, LOG = "job.sh", "slurm.json", "logs/slurm.log"
# Variables where Slurm lists the job's GPUs (gres.conf: Flags), ROCr's first. Slurm does not set
# HIP_VISIBLE_DEVICES.
MASKS = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
# SBATCH_* variables of the shell override options of the script. Pass only these defaults of a
# site, and only if the key is null.
SITE_DEFAULTS = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
}
# Jobs continue while the controller restarts or is busy, so keep following them.
PATIENCE_S = 3600.0
# The squeue manual warns against frequent calls in a loop.
QUERY_EVERY_S = 5.0
POLL_S = 0.2
HEAD = """\
#!/usr/bin/env bash
# {name}, written by `python launch/run.py runtime=slurm`. Every node must see the run directory,
# the repository and Python. The job inherits the environment of the shell that submits it, so
# tokens are not written to files.
"""


def call(*argv: str, env: dict[str, str] | None = None) -> str:
    """Return the output of a Slurm command. Raises HostError if it fails or is not installed."""
    try:
        result = subprocess.run(argv, capture_output=True, text=True, env=env)
    except OSError as error:
        why = str(error.strerror)
    else:
        if result.returncode == 0:
            return result.stdout
        why = result.stderr.strip() or f"exit code {result.returncode}"
    raise HostError(f"{shlex.join(argv)} failed: {why}")


def script(plan: Plan, host: Host) -> str:
    """Return the sbatch script."""
    config, slurm = plan.config, plan.config.runtime.slurm
    needs_gpus = config.hardware.vendor != Vendor.none and not config.method.exports
    options = {
        "job-name": plan.name,
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gres": f"{slurm.gres}:{num_gpus(config)}" if needs_gpus else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "chdir": host.cwd,
        # sbatch replaces fields such as %j in file names.
        "output": str(plan.run_dir / LOG).replace("%", "%%"),
        "open-mode": "append",
        # B: signals only the launcher, which lets every rank save. Others would exit immediately.
        "signal": f"B:TERM@{slurm.early_signal_s}",
        "export": "ALL",
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    lines += ["--requeue" if slurm.requeue else "--no-requeue", *slurm.options]
    command = ["exec", slurm.python or sys.executable, str(JOB_PROGRAM), str(plan.run_dir)]
    options_text = "".join(f"#SBATCH {shlex.quote(line)}\n" for line in lines)
    return f"{HEAD.format(name=plan.name)}{options_text}\n{shlex.join(command)}\n"


def overrides_script(name: str, slurm: Slurm) -> bool:
    """Return whether this variable of the shell would override an option of the script."""
    if name == "SLURM_CLUSTERS":
        return any(option.startswith("--clusters") for option in slurm.options)
    key = SITE_DEFAULTS.get(name)
    return name.startswith("SBATCH_") and (key is None or getattr(slurm, key) is not None)


def submit(plan: Plan, host: Host) -> int:
    """Write the run directory and submit its script; return the exit code.

    Raises HostError if sbatch fails, and UserError if a job of this run is still queued.
    """
    text = script(plan, host)
    inherited.check_copies(host.environ)
    check_plan(plan)
    # Nodes often cannot download or convert an image.
    if plan.config.runtime.on_node == "pyxis":
        check_pyxis(plan.config)
    if plan.config.runtime.on_node == "apptainer":
        apptainer.convert(plan, host)
    job = str((json_files.read_json(plan.run_dir / JOB) or {}).get("job", ""))
    if job and (state := state_of(job)):
        status = f"{plan.run_dir}: job {job} of this run is {state}."
        # A second job of the same run would fail, because the first one holds the lock.
        if not plan.config.runtime.slurm.wait:
            raise UserError(
                f"{status} Use runtime.slurm.wait=true to follow it, resume=never to start another "
                f"run, or `scancel {_job_arguments(job)}` first."
            )
        show.say(plan.config, f"{status} Following it.")
        return follow(plan, job)
    plan = with_commits(plan, host)  # nodes often have no network
    rundir.make(plan.run_dir)
    file = plan.run_dir / SCRIPT
    run_record = record.begin(plan, host, None)
    with rundir.locked(plan.run_dir):
        write_inputs(plan)
        submitted = sealed.seal({**run_record, "status": "submitted"})
        json_files.write_json(plan.run_dir / "record.json", submitted)
        json_files.write_text(file, text)
    slurm = plan.config.runtime.slurm
    dropped = sorted(name for name in os.environ if overrides_script(name, slurm))
    if dropped:
        show.say(
            plan.config,
            f"{', '.join(dropped)}: not passed to sbatch, to keep the settings of this run. "
            "Use runtime.slurm.<key>= or runtime.slurm.options instead.",
        )
    # A GPU mask of this shell applies to this machine. Slurm sets the mask of the job.
    withheld = {*MASKS, *MASK.values(), *dropped}
    environ = {name: value for name, value in os.environ.items() if name not in withheld}
    try:
        with signals():  # a signal must not lose the job's number
            job = call("sbatch", "--parsable", str(file), env=environ).strip()
            json_files.write_json(plan.run_dir / JOB, {"job": job})
    except HostError as error:
        record.write_failure(run_record, plan.run_dir, EXIT_HOST, str(error))
        raise HostError(
            f"{error}\nruntime.slurm.<key>= changes the script. If sbatch is missing, use a login "
            "node or install it (Debian: apt-get install slurm-client). runtime=local runs here."
        ) from error
    if plan.config.format == Format.json:
        print(json.dumps({"run_dir": str(plan.run_dir), "job": job, "script": str(file)}, indent=1))
    show.say(
        plan.config,
        f"{plan.name}: submitted job {job}; `scancel {_job_arguments(job)}` stops it.\n"
        f"All files are in {plan.run_dir}; the output is in {LOG}",
    )
    return follow(plan, job) if plan.config.runtime.slurm.wait else EXIT_DONE


def _job_arguments(job: str) -> str:
    """Convert sbatch's `number;cluster` into arguments of squeue and scancel."""
    return job.replace(";", " --clusters=")


def state_of(job: str) -> str | None:
    """Return the state of a job, such as RUNNING; None if it has left the queue.

    Raises HostError if squeue fails.
    """
    number, *cluster = _job_arguments(job).split()
    try:
        output = call("squeue", "--noheader", f"--jobs={number}", *cluster, "--format=%T")
    except HostError as error:
        if "Invalid job id" in str(error):  # Slurm has forgotten the job
            return None
        raise
    # With --clusters, older versions print `CLUSTER: name` despite --noheader.
    lines = (line for line in output.split("\n") if not line.startswith("CLUSTER:"))
    return "\n".join(filter(None, lines)) or None


def follow(plan: Plan, job: str) -> int:
    """Show the job's output until it leaves the queue, and return its exit code.

    Stop signals do not stop the job. Raises HostError if Slurm does not answer for an hour.
    """
    log, since, answers = Follower(plan.run_dir / LOG), time.monotonic(), True
    state: str | None = "unknown"
    with signals() as stopping:
        while state and not stopping:
            try:
                state, answers, since = state_of(job), True, time.monotonic()
            except HostError as error:  # the controller may be busy
                if time.monotonic() >= since + PATIENCE_S:
                    raise
                if answers:
                    show.say(plan.config, f"{error}. Trying again.")
                answers = False
            for line in log.lines(with_partial=not state):
                show.say(plan.config, line)
            next_query = time.monotonic() + QUERY_EVERY_S
            while state and not stopping and time.monotonic() < next_query:
                time.sleep(POLL_S)
    if state:
        show.say(plan.config, f"job {job} continues; `scancel {_job_arguments(job)}` stops it.")
        return EXIT_INTERRUPTED
    exit_code = (json_files.read_json(plan.run_dir / "record.json") or {}).get("exit_code")
    if exit_code is None:
        show.say(
            plan.config,
            f"job {job} has left the queue without a result, so it was cancelled or killed. "
            f"See {plan.run_dir / LOG}.",
        )
        return EXIT_FAILED
    return int(exit_code)
