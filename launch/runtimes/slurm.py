"""runtime=slurm: the script of a job, written into the run directory and handed to sbatch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from typing import Any

from launch import record, show
from launch.environment import MASK
from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError
from launch.execute import check_plan, write_inputs
from launch.files import rundir, sealed
from launch.machine.detect import Host
from launch.plan import Plan, as_json
from launch.rules.slurm import OWNED
from launch.runtimes.slurm_process import JOB_PROGRAM
from launch.schema import Config
from launch.schema.enums import Format, Vendor
from launch.supervision.logs import Follower
from launch.topology import num_gpus

SCRIPT, JOB, LOG = "job.sh", "slurm.json", "logs/slurm.log"  # in the run directory
# Slurm's masks of the GPUs it gives (gres.conf: Flags), ROCr's first. HIP_VISIBLE_DEVICES is none of them: it would be a shell's own.
MASKS = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
# SBATCH_<NAME> of the shell beats an option of the script. Sites set defaults by them, which hold where a key of these is null.
DEFAULTS = {"--partition", "--account", "--qos", "--time"}
MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")  # each excludes the others
ANOTHER_NAME = {
    "--time": ("TIMELIMIT",),
    "--array": ("ARRAY_INX",),
    "--switches": ("REQ_SWITCH", "WAIT4SWITCH"),
    "--cpu-freq": ("CPU_FREQ_REQ",),
    **dict.fromkeys(("--mem", "--mem-per-cpu", "--mem-per-gpu"), MEMORY),
}
PATIENCE_S = 3600.0  # the jobs of a cluster whose controller restarts, or is busy, go on meanwhile
ASK_EVERY_S = 5.0  # Slurm's own advice is not to ask its controller in a tight loop
HEAD = """\
#!/usr/bin/env bash
# {name}, written by `python launch/run.py runtime=slurm`. The run directory, the repository and Python are where every node sees
# them. The job takes its environment from the shell that submits it: tokens come from there, and stand in no file.
"""


def script(plan: Plan, host: Host) -> str:
    """The sbatch script. Raises UserError for a value that no line of it can hold."""
    config, asked = plan.config, plan.config.runtime.slurm
    output = str(plan.run_dir / LOG).replace("%", "%%")  # % begins a field of sbatch's
    options = {
        "job-name": plan.name,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "gres": f"{asked.gres}:{num_gpus(config)}" if config.hardware.vendor != Vendor.none and config.method.kind != "exporter" else None,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time": asked.time,
        "chdir": host.cwd,
        "output": output,
        "open-mode": "append",
        # To the batch shell only, which is the launcher: it lets every rank save. All other processes would end at once.
        "signal": f"B:TERM@{asked.early_signal_s}",
        "export": "ALL",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    lines = [*given, "--requeue" if asked.requeue else "--no-requeue", *asked.options]
    command = ["exec", asked.python or sys.executable, str(JOB_PROGRAM), str(plan.run_dir)]
    for value in [*lines, *command]:
        if not value.isprintable() or "\\" in value:
            raise UserError(f"{value!r}: a line of a Slurm script holds no backslash and no line break. Use: another name or directory.")
    head = HEAD.format(name=plan.name)
    return head + "".join(f"#SBATCH {shlex.quote(line)}\n" for line in lines) + f"\n{shlex.join(command)}\n"


def overruling(text: str) -> set[str]:
    """Variables by which sbatch would take something else than this script says, or than the launcher counts on."""
    lines = (shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH "))
    options = {line.partition("=")[0] for line in lines} | (OWNED.keys() - DEFAULTS)
    names = (ANOTHER_NAME.get(option, (option.removeprefix("--").upper().replace("-", "_"),)) for option in options)
    return {f"SBATCH_{name}" for several in names for name in several} | ({"SLURM_CLUSTERS"} if "--clusters" in options else set())


def submit(plan: Plan, host: Host, overrides: list[str], config: Config) -> int:
    """Write the run directory and hand the script to sbatch. Returns the exit code. Raises HostError and UserError."""
    text = script(plan, host)
    check_plan(plan)
    if shutil.which("sbatch") is None:
        raise HostError(
            "sbatch: not found. runtime=slurm submits from a machine of the cluster that has Slurm's commands, as its login nodes do "
            "(Debian: apt-get install slurm-client). mode=plan shows the script; runtime=local runs here."
        )
    if under_way := _under_way(plan):
        return follow(plan, config, under_way)
    rundir.make(plan.run_dir)
    began = record.begin(plan, host, None, overrides, None)
    with rundir.locked(plan.run_dir):
        write_inputs(plan, overrides)
        rundir.write_json(plan.run_dir / "record.json", sealed.seal({**began, "status": "submitted"}))
        rundir.write_text(plan.run_dir / SCRIPT, text)
    file = plan.run_dir / SCRIPT
    beaten = sorted(overruling(text) & os.environ.keys())
    if beaten:
        show.say(config, f"not passed to sbatch, since the composition decides it: {', '.join(beaten)} of this shell")
    # Without a mask of this shell's, which names GPUs of this machine: one that is there in the job is Slurm's.
    environ = {name: value for name, value in os.environ.items() if name not in (*MASKS, *MASK.values(), *beaten)}
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        refused = done.stderr.strip() or f"exit code {done.returncode}"
        failed = record.finish(began, plan.run_dir, "failed", EXIT_HOST, [], {"error": refused})
        rundir.write_json(plan.run_dir / "record.json", failed)
        raise HostError(f"sbatch refuses the job: {refused}\nThe script is {file}; runtime.slurm.<key>= changes it.")
    job = done.stdout.strip()
    rundir.write_json(plan.run_dir / JOB, {"job": job})
    _say_submitted(plan, config, job)
    return follow(plan, config, job) if plan.config.runtime.slurm.wait else EXIT_DONE


def _say_submitted(plan: Plan, config: Config, job: str) -> None:
    if config.format == Format.json:
        print(json.dumps({"run_dir": str(plan.run_dir), "job": job, "script": str(plan.run_dir / SCRIPT)}, indent=1))
    words = _words(job)
    show.say(config, f"{plan.name}: job {job} is submitted. `squeue -j {words}` shows where it is, `scancel {words}` ends it.")
    show.say(config, f"It writes to {plan.run_dir / LOG}")
    show.say(config, f"Everything is in {plan.run_dir}")


def _under_way(plan: Plan) -> str | None:
    """The job that this run has already, to be followed (runtime.slurm.wait). Raises UserError where nobody waits: two jobs of one run
    would wait for each other's lock, and fail."""
    job = str((rundir.read_json(plan.run_dir / JOB) or {}).get("job", ""))
    state = state_of(job) if job else None
    if not state:
        return None
    said = f"{plan.run_dir}: job {job} of this run is {state}."
    if not plan.config.runtime.slurm.wait:
        raise UserError(
            f"{said} Use: runtime.slurm.wait=true to follow it, resume=never for another run, or `scancel {_words(job)}` first."
        )
    show.say(plan.config, f"{said} It is followed.")
    return job


def _words(job: str) -> str:
    """How squeue and scancel are told of a job: sbatch names it by its number, and `number;cluster` where clusters are several."""
    return job.replace(";", " --clusters=")


def state_of(job: str) -> str | None:
    """What Slurm says of a job that is in its queue, for example RUNNING; None once it has left it. Raises HostError."""
    number, *cluster = _words(job).split()
    try:
        done = subprocess.run(["squeue", "--noheader", f"--jobs={number}", *cluster, "--format=%T"], capture_output=True, text=True)
    except OSError as error:
        raise HostError(f"squeue: {error.strerror}") from error
    if done.returncode != 0 and "Invalid job id" not in done.stderr:  # what it says of a job that is long gone
        raise HostError(f"squeue cannot say how job {job} is: {done.stderr.strip()}")
    # With a cluster, older ones print `CLUSTER: name` all the same.
    return "\n".join(line for line in done.stdout.split("\n") if line and not line.startswith("CLUSTER:")) or None


def _asked(config: Config, job: str) -> str | None:
    """As state_of, asked again where there is no answer, as a busy controller gives none now and then. Raises HostError after an hour."""
    until, said = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return state_of(job)
        except HostError as error:
            if time.monotonic() >= until:
                raise
            if not said:
                show.say(config, f"{error}. It is asked again.")
            said = True
        time.sleep(ASK_EVERY_S)


def follow(plan: Plan, config: Config, job: str) -> int:
    """Show what the job writes until it has left the queue; its exit code. Ctrl-C ends the watching, not the job."""
    log = Follower(plan.run_dir / LOG)
    try:
        while True:
            state = _asked(config, job)
            for line in log.lines(all_of_it=state is None):
                show.say(config, line)
            if state is None:
                break
            time.sleep(ASK_EVERY_S)
    except KeyboardInterrupt:
        show.say(config, f"job {job} goes on; `scancel {_words(job)}` ends it.")
        return EXIT_INTERRUPTED
    ended: dict[str, Any] = rundir.read_json(plan.run_dir / "record.json") or {}
    if ended.get("exit_code") is None:
        show.say(config, f"job {job} has left the queue and the run has no end: cancelled, or killed. {plan.run_dir / LOG} may say more.")
        return EXIT_FAILED
    return int(ended["exit_code"])


def plan_json(plan: Plan, host: Host) -> dict[str, Any]:
    """The plan with its script, for mode=plan format=json."""
    return {**as_json(plan), "script": script(plan, host)}
