"""Define rules about runtime=slurm: what a job may request, and when several nodes make sense."""

from __future__ import annotations

import re

from launch.machine.placement import trainers_of_a_node
from launch.rules.rule import Rule, rule_of
from launch.schema import Config

# sbatch options that follow from the composition -> the keys that decide them
OWNED = {
    "--nodes": "runtime.slurm.nodes",
    "--partition": "runtime.slurm.partition",
    "--account": "runtime.slurm.account",
    "--qos": "runtime.slurm.qos",
    "--time": "runtime.slurm.time",
    "--gres": "runtime.slurm.gres and topology.num_gpus",
    "--gpus": "topology.num_gpus",
    **dict.fromkeys(
        ("--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "topology.num_gpus"
    ),
    "--signal": "runtime.slurm.early_signal_s",
    "--requeue": "runtime.slurm.requeue",
    "--no-requeue": "runtime.slurm.requeue",
    "--wait": "runtime.slurm.wait",
    "--job-name": "name",
    **dict.fromkeys(
        ("--ntasks", "--ntasks-per-node", "--tasks-per-node"),
        "the launcher, which starts one task a node",
    ),
    **dict.fromkeys(
        ("--output", "--error", "--open-mode", "--chdir", "--export"),
        "the launcher, which keeps a run's files together",
    ),
    **dict.fromkeys(
        ("--array", "--parsable", "--test-only", "--wrap"), "nothing: a job is one run"
    ),
}
# sbatch's forms of a time: [days-]hours[:minutes[:seconds]] with days, else minutes[:seconds] or
# hours:minutes:seconds
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
LONG_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?")
CORES = ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")  # options that give a job more cores


def seconds(time: str) -> int | None:
    """Return the seconds of an sbatch time; 0 means no limit, None a malformed time."""
    found = TIME.fullmatch(time)
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, rest = [*parts, 0, 0][:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + rest
    hours, minutes, rest = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return (hours * 60 + minutes) * 60 + rest


def _owner(option: str) -> str | None:
    """Return the key that decides an sbatch option, which may be abbreviated as in getopt."""
    name = option.partition("=")[0]
    return OWNED.get(name) or next(
        (OWNED[owned] for owned in OWNED if owned.startswith(name)), None
    )


def slurm_warnings(config: Config) -> list[str]:
    """Return a warning about a job that requests no cores."""
    names = [option.partition("=")[0] for option in config.runtime.slurm.options]
    if config.runtime.name != "slurm" or any(
        cores.startswith(name) for name in names for cores in CORES
    ):
        return []
    return [
        "runtime.slurm.options asks for no cores, and many clusters give such a job one, for "
        f"all {trainers_of_a_node(config)} rank(s) "
        "of a node. Use: runtime.slurm.options=['--exclusive','--mem=0'] for the whole node, "
        "['--cpus-per-task=N'] for N of its cores."
    ]


def _option_fault(config: Config) -> tuple[str, str] | None:
    """Return the first option that is not a long option, or that a key decides."""
    for option in config.runtime.slurm.options if config.runtime.name == "slurm" else []:
        owner = _owner(option)
        if owner or not LONG_OPTION.fullmatch(option):
            is_long = LONG_OPTION.fullmatch(option)
            why = f"is decided by {owner}" if is_long else "is not a long option"
            return (
                f"runtime.slurm.options: {option!r} {why}",
                "other options, such as runtime.slurm.options=['--exclusive','--constraint=ib']",
            )
    return None


SLURM_RULES = [
    rule_of("slurm_options", _option_fault),
    Rule(
        "slurm_time_early",
        lambda c: (
            c.runtime.name == "slurm"
            and 0 < (seconds(c.runtime.slurm.time or "") or 0) <= c.runtime.slurm.early_signal_s
        ),
        lambda c: (
            f"runtime.slurm.time={c.runtime.slurm.time}: Slurm would stop the job "
            f"{c.runtime.slurm.early_signal_s} s before, as it starts"
        ),
        "a longer time, or a shorter early_signal_s with a stop_timeout_s below it",
    ),
]
