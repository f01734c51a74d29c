"""Rows of check.py's table about sampling and RAFT."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.trainer_args import argument

BASES = ("continued", "fresh")
OF_CYCLES = ("cycle", "num_cycles")  # what method=raft gives each of its phases


def _samples(config: Config) -> bool:
    return config.method.name == "sample"


def _owned(config: Config) -> list[str]:
    given = argument(config, "sample") if config.method.kind == "cycles" else None
    return [name for name in OF_CYCLES if name in (given or {})]


CYCLE_RULES = [
    Rule(
        "raft_base",
        lambda c: c.method.kind == "cycles" and argument(c, "base") not in BASES,
        lambda c: f"method.args.base={argument(c, 'base')}: it says what each cycle's training starts from",
        lambda c: "continued (the newest model) or fresh (the first one)",
    ),
    Rule(
        "raft_decay",
        lambda c: c.method.kind == "cycles" and not 0 < float(argument(c, "learning_rate_decay")) <= 1,
        lambda c: f"method.args.learning_rate_decay={argument(c, 'learning_rate_decay'):g}: each cycle's learning rate, of the one before",
        lambda c: "a number above 0 and up to 1; 1 keeps it",
    ),
    Rule(
        "raft_decides",
        lambda c: bool(_owned(c)),
        lambda c: f"method.args.sample.{_owned(c)[0]}: RAFT counts its cycles itself",
        lambda c: "method.args.cycles=N, or method=sample by itself",
    ),
    Rule(
        "raft_adapter_path",
        lambda c: c.method.kind == "cycles" and c.adapter.path is not None,
        lambda c: f"adapter.path={c.adapter.path} with method=raft: every cycle trains an adapter of its own, and merges it for the next",
        lambda c: "model.path=<the run that left the adapter>/model, in which it is merged",
    ),
    Rule(
        "sample_greedy",
        lambda c: _samples(c) and argument(c, "temperature") == 0 and argument(c, "samples_per_prompt") > 1,
        lambda c: f"method.args.temperature=0 with samples_per_prompt={argument(c, 'samples_per_prompt')}: all samples would be the same",
        lambda c: "a temperature above 0, for example 1.0; or samples_per_prompt=1",
    ),
    Rule(
        "sample_fraction",
        lambda c: _samples(c) and not 0 < argument(c, "top_fraction") <= 1,
        lambda c: f"method.args.top_fraction={argument(c, 'top_fraction'):g}: a share of the samples that would be kept",
        lambda c: "a number above 0 and up to 1; 1 keeps all",
    ),
    Rule(
        "sample_threshold",
        lambda c: _samples(c) and not 0 <= argument(c, "threshold") <= 1,
        lambda c: f"method.args.threshold={argument(c, 'threshold'):g}: the least score of what is kept, and scores are from 0 to 1",
        lambda c: "1.0, which keeps full scores only, or less; 0 keeps all",
    ),
]
