"""Rules about runtime=slurm: what a job may ask for, and where several nodes make sense."""

from __future__ import annotations

import dataclasses
import re

from launch.rules.rule import Rule
from launch.schema import Config, Inner, Slurm
from launch.schema.enums import Vendor
from launch.topology import trainers_of_a_node

# topologies whose ranks are alike, and may stand on any number of nodes
SPREAD = ("ddp", "fsdp", "zero2", "zero3")
# options of sbatch that follow from the composition -> what decides them
OWNED = {
    "--nodes": "runtime.slurm.nodes",
    "--partition": "runtime.slurm.partition",
    "--account": "runtime.slurm.account",
    "--qos": "runtime.slurm.qos",
    "--time": "runtime.slurm.time",
    "--gres": "runtime.slurm.gres and topology.num_gpus",
    "--gpus": "topology.num_gpus",
    **dict.fromkeys(("--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "topology.num_gpus"),
    "--signal": "runtime.slurm.early_signal_s",
    "--requeue": "runtime.slurm.requeue",
    "--no-requeue": "runtime.slurm.requeue",
    "--wait": "runtime.slurm.wait",
    "--job-name": "name",
    **dict.fromkeys(("--ntasks", "--ntasks-per-node", "--tasks-per-node"), "the launcher, which starts one task a node"),
    **dict.fromkeys(("--output", "--error", "--open-mode", "--chdir", "--export"), "the launcher, which keeps a run's files together"),
    **dict.fromkeys(("--array", "--parsable", "--test-only", "--wrap"), "nothing: a job is one run"),
}
# sbatch's forms of a time: [days-]hours[:minutes[:seconds]] with days, else minutes[:seconds] or hours:minutes:seconds
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
GRES = re.compile(r"[A-Za-z]\w*(?::(?!\d{1,2}$)[\w.-]+)?")  # a type may be a number, as 4090, and is none below 100
TEXTS = ("partition", "account", "qos", "time", "gres", "python", "interface", "hca")
LONG_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?")
CORES = ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")  # options that give a job more of them
UNLIMITED = ("infinite", "unlimited")
MOST_NODES = 1024  # the job's first node starts and watches an srun for each
MOST_EARLY_S = 65535  # sbatch --signal


def seconds(time: str) -> int | None:
    """Of a time as sbatch takes it; 0 is no limit. None for what is none."""
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
    """What decides an option, also one that is abbreviated: sbatch takes every beginning of a name that is no other's."""
    name = option.partition("=")[0]
    return OWNED.get(name) or next((OWNED[owned] for owned in OWNED if owned.startswith(name)), None)


def _bad_option(config: Config) -> str | None:
    """The first that is no long option, or that something else decides."""
    return next((o for o in config.runtime.slurm.options if not LONG_OPTION.fullmatch(o) or _owner(o)), None)


def slurm_warnings(config: Config) -> list[str]:
    """What a job may lack that no key decides."""
    names = [option.partition("=")[0] for option in config.runtime.slurm.options]
    if config.runtime.name != "slurm" or any(cores.startswith(name) for name in names for cores in CORES):
        return []
    return [
        f"runtime.slurm.options asks for no cores, and many clusters give such a job one, for all {trainers_of_a_node(config)} rank(s) "
        "of a node. Use: runtime.slurm.options=['--exclusive','--mem=0'] for the whole node, ['--cpus-per-task=N'] for N of its cores."
    ]


def _too_early(config: Config) -> bool:
    slurm = config.runtime.slurm
    limit = seconds(slurm.time) if slurm.time else None
    return limit is not None and 0 < limit <= slurm.early_signal_s


def _empty(config: Config) -> list[str]:
    return [key for key in TEXTS if getattr(config.runtime.slurm, key) == ""]


def _network_keys(config: Config) -> list[str]:
    return [key for key in ("interface", "hca", "gid_index") if getattr(config.runtime.slurm, key) is not None]


def _given(config: Config) -> str:
    """The first key that is not as it stands in the schema."""
    slurm, usual = config.runtime.slurm, Slurm()
    key = next(field.name for field in dataclasses.fields(slurm) if getattr(slurm, field.name) != getattr(usual, field.name))
    value = getattr(slurm, key)
    return f"runtime.slurm.{key}={value.name if isinstance(value, Inner) else value}"


IGNORED = Rule(
    "slurm_keys",
    lambda c: c.runtime.name != "slurm" and c.runtime.slurm != Slurm(),
    lambda c: f"{_given(c)} under runtime={c.runtime.name}: it would be ignored",
    lambda c: "runtime=slurm",
)
OF_A_JOB = [
    Rule(
        "slurm_nodes",
        lambda c: c.runtime.slurm.nodes > 1 and c.topology.name not in SPREAD,
        lambda c: (
            f"topology={c.topology.name} on runtime.slurm.nodes={c.runtime.slurm.nodes}: a server and its trainers, and what runs in one "
            "process, stay on one node"
        ),
        lambda c: f"{' or '.join(f'topology={name}' for name in SPREAD)}; or runtime.slurm.nodes=1",
    ),
    Rule(
        "slurm_num_nodes",
        lambda c: c.runtime.slurm.nodes > MOST_NODES,
        lambda c: f"runtime.slurm.nodes={c.runtime.slurm.nodes}: one launcher starts and watches a process on each",
        lambda c: f"1 to {MOST_NODES}",
    ),
    Rule(
        "slurm_nodes_docker",
        lambda c: c.runtime.slurm.nodes > 1 and c.runtime.on_node == "docker",
        lambda c: f"runtime.slurm.inner=docker on {c.runtime.slurm.nodes} nodes: containers of several nodes are not offered",
        lambda c: "runtime.slurm.inner=local with runtime.slurm.python=<the Python of an environment that every node sees>, or one node",
    ),
    Rule(
        "slurm_interface",
        lambda c: c.runtime.slurm.nodes > 1 and c.runtime.slurm.interface is None and c.hardware.vendor != Vendor.none,
        lambda c: f"runtime.slurm.nodes={c.runtime.slurm.nodes} without runtime.slurm.interface: which network joins them is not guessed",
        lambda c: (
            "runtime.slurm.interface=<name>, from `srun ip -br address` on the cluster: the one with an address on every node, ib0 for "
            "InfiniBand (docs/slurm.md)"
        ),
    ),
    Rule(
        "slurm_network_alone",
        lambda c: c.runtime.slurm.nodes == 1 and bool(_network_keys(c)),
        lambda c: f"runtime.slurm.{_network_keys(c)[0]} with one node: it would be ignored",
        lambda c: "runtime.slurm.nodes=2 or more",
    ),
    Rule(
        "slurm_gid_index",
        lambda c: c.runtime.slurm.gid_index is not None and c.runtime.slurm.hca is None,
        lambda c: f"runtime.slurm.gid_index={c.runtime.slurm.gid_index} without runtime.slurm.hca: every adapter has a table of its own",
        lambda c: "runtime.slurm.hca=<adapter>:<port> beside it, from `show_gids` or /sys/class/infiniband",
    ),
    Rule(
        "slurm_empty",
        lambda c: bool(_empty(c)),
        lambda c: f"runtime.slurm.{_empty(c)[0]}=: an empty text, which would be passed on or ignored",
        lambda c: f"a name, or no runtime.slurm.{_empty(c)[0]}",
    ),
    Rule(
        "slurm_gres",
        lambda c: bool(c.runtime.slurm.gres) and not GRES.fullmatch(c.runtime.slurm.gres),
        lambda c: (
            f"runtime.slurm.gres={c.runtime.slurm.gres}: it names one resource, with its type at most, and topology.num_gpus is its count"
        ),
        lambda c: "runtime.slurm.gres=gpu or, for example, runtime.slurm.gres='gpu:mi300x', with topology.num_gpus=N",
    ),
    Rule(
        "slurm_options",
        lambda c: _bad_option(c) is not None,
        lambda c: (
            f"runtime.slurm.options: {_bad_option(c)!r} "
            + (f"is decided by {_owner(str(_bad_option(c)))}" if LONG_OPTION.fullmatch(str(_bad_option(c))) else "is no long option")
        ),
        lambda c: "options of sbatch that nothing here decides, for example runtime.slurm.options=['--exclusive','--constraint=ib']",
    ),
    Rule(
        "slurm_time",
        lambda c: str(c.runtime.slurm.time or UNLIMITED[0]).lower() not in UNLIMITED and seconds(str(c.runtime.slurm.time)) is None,
        lambda c: f"runtime.slurm.time={c.runtime.slurm.time}: no time that sbatch takes",
        lambda c: "minutes, hours:minutes:seconds, days-hours or days-hours:minutes:seconds, for example 4:00:00",
    ),
    Rule(
        "slurm_time_early",
        _too_early,
        lambda c: (
            f"runtime.slurm.time={c.runtime.slurm.time} with runtime.slurm.early_signal_s={c.runtime.slurm.early_signal_s}: "
            "the job would be told to stop as it starts"
        ),
        lambda c: "a longer time, or a shorter early_signal_s with a stop_timeout_s below it",
    ),
    Rule(
        "slurm_early_signal",
        lambda c: c.runtime.name == "slurm" and not c.runtime.stop_timeout_s < c.runtime.slurm.early_signal_s <= MOST_EARLY_S,
        lambda c: (
            f"runtime.slurm.early_signal_s={c.runtime.slurm.early_signal_s} with runtime.stop_timeout_s={c.runtime.stop_timeout_s}: "
            "Slurm kills what is left when the time is over, and a save may take stop_timeout_s"
        ),
        lambda c: f"early_signal_s above stop_timeout_s, by 60 s since Slurm may be late with it, and at most {MOST_EARLY_S}",
    ),
]


def _of_a_job(rule: Rule) -> Rule:
    """Without runtime=slurm it is enough that all of it would be ignored: what else is wrong follows from that."""
    return dataclasses.replace(rule, applies=lambda c: c.runtime.name == "slurm" and rule.applies(c))


SLURM_RULES = [IGNORED, *map(_of_a_job, OF_A_JOB)]
