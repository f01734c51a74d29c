"""Write a job script into the run directory and hand it to sbatch (runtime=slurm)."""

from __future__ import annotations

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
from launch.execution import record
from launch.execution.execute import check_plan, write_inputs
from launch.execution.logs import Follower
from launch.execution.slurm_process import JOB_PROGRAM
from launch.machine.detect import Host
from launch.machine.placement import MASK, num_gpus
from launch.plan import rundir, sealed, show
from launch.schema import Slurm
from launch.schema.enums import Format, Vendor
from launch.schema.plan import Plan

# Files in the run directory.
SCRIPT, JOB, LOG = "job.sh", "slurm.json", "logs/slurm.log"
# Slurm's masks of the GPUs that it assigns (gres.conf: Flags), ROCr's first. HIP_VISIBLE_DEVICES
# would come from a shell.
MASKS = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
# SBATCH_<NAME> in the shell overrides an option of the script. Only these defaults of a site are
# passed, if their key is null.
SITE_DEFAULTS = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
}
# A cluster's jobs continue while its controller restarts or is busy.
PATIENCE_S = 3600.0
# Slurm itself advises against asking its controller in a tight loop.
ASK_EVERY_S = 5.0
HEAD = """\
#!/usr/bin/env bash
# {name}, written by `python launch/run.py runtime=slurm`. Every node must see the run directory,
# the repository and Python. The job takes its environment from the shell that submits it: tokens
# come from there and are not written to files.
"""


def call(*argv: str, env: dict[str, str] | None = None) -> str:
    """Return what a Slurm command prints. Raises HostError if it fails or is missing."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
    except OSError as error:
        why = str(error.strerror)
    else:
        if done.returncode == 0:
            return done.stdout
        why = done.stderr.strip() or f"exit code {done.returncode}"
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
        # In sbatch, % begins a field.
        "output": str(plan.run_dir / LOG).replace("%", "%%"),
        "open-mode": "append",
        # Signal only the batch shell, which is the launcher and lets every rank save. Other
        # processes would end at once.
        "signal": f"B:TERM@{slurm.early_signal_s}",
        "export": "ALL",
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    lines += ["--requeue" if slurm.requeue else "--no-requeue", *slurm.options]
    command = ["exec", slurm.python or sys.executable, str(JOB_PROGRAM), str(plan.run_dir)]
    options_text = "".join(f"#SBATCH {shlex.quote(line)}\n" for line in lines)
    return f"{HEAD.format(name=plan.name)}{options_text}\n{shlex.join(command)}\n"


def overrides_script(name: str, slurm: Slurm) -> bool:
    """Return whether a variable of the shell would override the script."""
    if name == "SLURM_CLUSTERS":
        return any(option.startswith("--clusters") for option in slurm.options)
    key = SITE_DEFAULTS.get(name)
    return name.startswith("SBATCH_") and (key is None or getattr(slurm, key) is not None)


def submit(plan: Plan, host: Host) -> int:
    """Write the run directory, hand the script to sbatch, and return the exit code.

    Raises HostError and UserError.
    """
    text = script(plan, host)
    check_plan(plan)
    job = str((json_files.read_json(plan.run_dir / JOB) or {}).get("job", ""))
    if job and (state := state_of(job)):
        words = f"{plan.run_dir}: job {job} of this run is {state}."
        # Two jobs of one run would wait for each other's lock, and fail.
        if not plan.config.runtime.slurm.wait:
            raise UserError(
                f"{words} Use runtime.slurm.wait=true to follow it, resume=never to start another "
                f"run, or `scancel {_words(job)}` first."
            )
        show.say(plan.config, f"{words} Following it.")
        return follow(plan, job)
    rundir.make(plan.run_dir)
    file = plan.run_dir / SCRIPT
    run_record = record.begin(plan, host, None)
    with rundir.locked(plan.run_dir):
        write_inputs(plan)
        submitted = sealed.seal({**run_record, "status": "submitted"})
        json_files.write_json(plan.run_dir / "record.json", submitted)
        json_files.write_text(file, text)
    slurm = plan.config.runtime.slurm
    overruled = sorted(name for name in os.environ if overrides_script(name, slurm))
    if overruled:
        show.say(
            plan.config,
            f"{', '.join(overruled)}: not passed to sbatch, because the composition sets them. "
            "Use runtime.slurm.options.",
        )
    # A mask in this shell names this machine's GPUs. In the job, Slurm sets the mask.
    withheld = {*MASKS, *MASK.values(), *overruled}
    environ = {name: value for name, value in os.environ.items() if name not in withheld}
    try:
        job = call("sbatch", "--parsable", str(file), env=environ).strip()
    except HostError as error:
        record.write_failure(run_record, plan.run_dir, EXIT_HOST, str(error))
        raise HostError(
            f"{error}\nruntime.slurm.<key>= changes the script. Without sbatch, use a login node "
            "(Debian: apt-get install slurm-client); runtime=local runs here."
        ) from error
    json_files.write_json(plan.run_dir / JOB, {"job": job})
    if plan.config.format == Format.json:
        print(json.dumps({"run_dir": str(plan.run_dir), "job": job, "script": str(file)}, indent=1))
    show.say(
        plan.config,
        f"{plan.name}: job {job} is submitted; `scancel {_words(job)}` ends it.\n"
        f"Everything is in {plan.run_dir}; its output is {LOG}",
    )
    return follow(plan, job) if plan.config.runtime.slurm.wait else EXIT_DONE


def _words(job: str) -> str:
    """Return how squeue and scancel name the job that sbatch names `number;cluster`."""
    return job.replace(";", " --clusters=")


def state_of(job: str) -> str | None:
    """Return Slurm's state of a queued job, such as RUNNING; None once it has left the queue.

    Raises HostError.
    """
    number, *cluster = _words(job).split()
    try:
        printed = call("squeue", "--noheader", f"--jobs={number}", *cluster, "--format=%T")
    except HostError as error:
        if "Invalid job id" in str(error):  # the job ended long ago
            return None
        raise
    # With a cluster, older versions print `CLUSTER: name` even with these options.
    lines = (line for line in printed.split("\n") if not line.startswith("CLUSTER:"))
    return "\n".join(filter(None, lines)) or None


def follow(plan: Plan, job: str) -> int:
    """Show what the job writes until it leaves the queue, and return its exit code.

    Ctrl-C only stops watching. Raises HostError after an hour without an answer of Slurm.
    """
    log, since, answers = Follower(plan.run_dir / LOG), time.monotonic(), True
    state: str | None = "unknown"
    try:
        while state:
            try:
                state, answers, since = state_of(job), True, time.monotonic()
            except HostError as error:  # as from a busy controller
                if time.monotonic() >= since + PATIENCE_S:
                    raise
                if answers:
                    show.say(plan.config, f"{error}. Asking again.")
                answers = False
            for line in log.lines(all_of_it=not state):
                show.say(plan.config, line)
            if state:
                time.sleep(ASK_EVERY_S)
    except KeyboardInterrupt:
        show.say(plan.config, f"job {job} continues; `scancel {_words(job)}` ends it.")
        return EXIT_INTERRUPTED
    exit_code = (json_files.read_json(plan.run_dir / "record.json") or {}).get("exit_code")
    if exit_code is None:
        show.say(
            plan.config,
            f"job {job} has left the queue, and its run did not end: cancelled or killed. "
            f"See {plan.run_dir / LOG}.",
        )
        return EXIT_FAILED
    return int(exit_code)
