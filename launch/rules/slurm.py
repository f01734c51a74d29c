"""Define rules about runtime=slurm: what a job may request, and when several nodes make sense."""

from __future__ import annotations

import dataclasses
import re

from launch.machine.placement import trainers_of_a_node
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.enums import Vendor

# topologies whose ranks are alike and may be on any number of nodes
SPREAD = ("ddp", "fsdp", "zero2", "zero3")
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
# A type may be a number, such as 4090; a number below 100 is a count.
GRES = re.compile(r"[A-Za-z]\w*(?::(?!\d{1,2}$)[\w.-]+)?")
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


def _bad_option(config: Config) -> str | None:
    """Return the first option that is not a long option, or that a key decides."""
    return next(
        (o for o in config.runtime.slurm.options if not LONG_OPTION.fullmatch(o) or _owner(o)), None
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


def _too_early(config: Config) -> bool:
    slurm = config.runtime.slurm
    limit = seconds(slurm.time) if slurm.time else None
    return limit is not None and 0 < limit <= slurm.early_signal_s


OF_A_JOB = [
    Rule(
        "slurm_nodes",
        lambda c: c.runtime.slurm.nodes > 1 and c.topology.name not in SPREAD,
        lambda c: f"topology={c.topology.name} runs on one node, not {c.runtime.slurm.nodes}",
        lambda c: f"{' or '.join(f'topology={name}' for name in SPREAD)}; or runtime.slurm.nodes=1",
    ),
    Rule(
        "slurm_nodes_docker",
        lambda c: c.runtime.slurm.nodes > 1 and c.runtime.on_node == "docker",
        "runtime.slurm.inner=docker runs on one node only",
        "runtime.slurm.inner=local runtime.slurm.python=<a Python that every node sees>",
    ),
    Rule(
        "slurm_interface",
        lambda c: (
            c.runtime.slurm.nodes > 1
            and c.runtime.slurm.interface is None
            and c.hardware.vendor != Vendor.none
        ),
        "runtime.slurm.interface is missing: the network between nodes is not guessed",
        ("runtime.slurm.interface=<name>, as in `srun ip -br address` (docs/slurm.md)"),
    ),
    Rule(
        "slurm_gid_index",
        lambda c: c.runtime.slurm.gid_index is not None and c.runtime.slurm.hca is None,
        "runtime.slurm.gid_index needs runtime.slurm.hca: each adapter has its own table",
        "runtime.slurm.hca=<adapter>:<port> beside it, from `show_gids` or /sys/class/infiniband",
    ),
    Rule(
        "slurm_gres",
        lambda c: bool(c.runtime.slurm.gres) and not GRES.fullmatch(c.runtime.slurm.gres),
        "runtime.slurm.gres names one resource, without its count",
        "runtime.slurm.gres='gpu:mi300x' topology.num_gpus=N",
    ),
    Rule(
        "slurm_options",
        lambda c: _bad_option(c) is not None,
        lambda c: (
            f"runtime.slurm.options: {_bad_option(c)!r} "
            + (
                f"is decided by {_owner(str(_bad_option(c)))}"
                if LONG_OPTION.fullmatch(str(_bad_option(c)))
                else "is no long option"
            )
        ),
        "other options, for example runtime.slurm.options=['--exclusive','--constraint=ib']",
    ),
    Rule(
        "slurm_time_early",
        _too_early,
        lambda c: (
            f"runtime.slurm.time={c.runtime.slurm.time}: Slurm would stop the job "
            f"{c.runtime.slurm.early_signal_s} s before, as it starts"
        ),
        "a longer time, or a shorter early_signal_s with a stop_timeout_s below it",
    ),
    Rule(
        "slurm_early_signal",
        lambda c: c.runtime.stop_timeout_s >= c.runtime.slurm.early_signal_s,
        lambda c: (
            f"runtime.slurm.early_signal_s={c.runtime.slurm.early_signal_s}: a save may take "
            f"runtime.stop_timeout_s={c.runtime.stop_timeout_s}"
        ),
        "early_signal_s 60 s or more above stop_timeout_s, and at most 65535",
    ),
]


def _of_a_job(rule: Rule) -> Rule:
    """Limit a rule to runtime=slurm, since its keys are unread elsewhere."""
    return dataclasses.replace(
        rule, applies=lambda c: c.runtime.name == "slurm" and rule.applies(c)
    )


SLURM_RULES = [*map(_of_a_job, OF_A_JOB)]
