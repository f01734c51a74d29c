"""Rows of check.py's table about rewards and the sandbox."""

from __future__ import annotations

import math
import re

from launch import trainer_args
from launch.errors import near
from launch.rules.rule import Rule
from launch.runtimes import sandbox
from launch.schema import Config, Sandbox

JUDGE = ("grpo", "raft", "sample")  # methods that ask the rewards, and need them
READS_COLUMN = ("accuracy", "reasoning_gym", "regex", "code_tests")
GENERATED = {"reasoning": ("accuracy", "reasoning_gym"), "code": ("code_tests",)}  # kind of rows -> those whose column they have


def _names() -> str:
    return ", ".join(trainer_args.lock()["rewards"])


def _unknown(config: Config) -> list[str]:
    return [name for name in config.method.rewards if "." not in name and name not in trainer_args.lock()["rewards"]]


def _stray(config: Config) -> list[str]:
    """Of the chain: what is no reward of the composition, or stands there twice."""
    chain = config.method.reward_chain
    return [name for i, name in enumerate(chain) if name not in config.method.rewards or name in chain[:i]]


def _infinite(config: Config) -> str | None:
    return next((name for name, weight in config.method.rewards.items() if not math.isfinite(weight)), None)


def _bad_pattern(config: Config) -> str | None:
    try:
        re.compile(config.method.reward_pattern or "")
    except re.error as error:
        return str(error)
    return None


def _without_column(config: Config, kind: str | None = None) -> list[str]:
    """Named rewards that read a column which generated rows of this kind do not have. What a file or the hub has is known later."""
    has = GENERATED.get(kind or config.data.kind)
    if has is None:
        return [name for name in config.method.rewards if name == "reasoning_gym"]  # reads the record of reasoning-gym's own task
    has = (*has, "regex") if config.method.reward_pattern is not None else has
    return [name for name in config.method.rewards if name in READS_COLUMN and name not in has]


def _fitting(config: Config) -> str:
    """A reward that reads what the rows have."""
    return "code_tests" if config.data.kind == "code" else "accuracy"


def _with_column(config: Config) -> str:
    """Data that all rewards can be asked of, a pattern for all rows, or a reward that reads what the rows have."""
    refused, fitting = _without_column(config), _fitting(config)
    ways = [f"data={kind}" for kind in GENERATED if not _without_column(config, kind)]
    ways += [r"method.reward_pattern='\d+'"] if refused[0] == "regex" else []
    reads = "runs the rows' tests" if fitting == "code_tests" else "reads a column answer"
    is_left = any(name in READS_COLUMN and name not in refused for name in config.method.rewards)
    instead = "" if is_left else f" +method.rewards.{fitting}=1.0, which {reads}"
    return ", or ".join([*ways, f"'~method.rewards.{refused[0]}'{instead}"])


REWARD_RULES = [
    Rule(
        "rewards_needed",
        lambda c: c.method.name in JUDGE and not c.method.rewards,
        lambda c: f"method={c.method.name} without rewards: nothing would be learned",
        lambda c: f"method.rewards.{_fitting(c)}=1.0; named rewards: {_names()}",
    ),
    Rule(
        "rewards_unused",
        lambda c: bool(c.method.rewards) and c.method.name not in (*JUDGE, "evaluate"),  # which has a scorer without them
        lambda c: f"method.rewards under method={c.method.name}: it would be ignored",
        lambda c: "method=grpo",
    ),
    Rule(
        "reward_unknown",
        lambda c: bool(_unknown(c)),
        lambda c: f"method.rewards.{_unknown(c)[0]}: no such reward.{near(_unknown(c)[0], trainer_args.lock()['rewards'])}",
        lambda c: f"{_names()}, or the dotted path of your function (package.module.function)",
    ),
    Rule(
        "rewards_weigh_nothing",
        lambda c: bool(c.method.rewards) and not any(c.method.rewards.values()),
        lambda c: f"method.rewards={c.method.rewards}: every weight is 0",
        lambda c: "a weight above 0 for one of them",
    ),
    Rule(
        "reward_infinite",
        lambda c: _infinite(c) is not None,
        lambda c: f"method.rewards.{_infinite(c)}={c.method.rewards[str(_infinite(c))]}: no finite number",
        lambda c: f"method.rewards.{_infinite(c)}=1.0, or another finite one",
    ),
    Rule(
        "reward_negative",
        lambda c: c.method.name != "grpo" and any(weight < 0 for weight in c.method.rewards.values()),
        lambda c: (
            f"method.rewards={c.method.rewards} under method={c.method.name}: with a weight below 0 no sample has the full score of 1"
        ),
        lambda c: "weights of 0 or more, or method=grpo",
    ),
    Rule(
        "reward_chain",
        lambda c: bool(_stray(c)),
        lambda c: f"method.reward_chain={c.method.reward_chain}: {_stray(c)[0]} is no reward of method.rewards, or stands there twice",
        lambda c: f"each of {', '.join(c.method.rewards) or 'the rewards'} at most once",
    ),
    Rule(
        "reward_pattern",
        lambda c: _bad_pattern(c) is not None,
        lambda c: f"method.reward_pattern={c.method.reward_pattern}: no regular expression of Python ({_bad_pattern(c)})",
        lambda c: r"for example '\d+', quoted for the shell",
    ),
    Rule(
        "reward_pattern_unused",
        lambda c: c.method.reward_pattern is not None and "regex" not in c.method.rewards,
        lambda c: "method.reward_pattern without the reward regex: it would be ignored",
        lambda c: "+method.rewards.regex=1.0, or no method.reward_pattern",
    ),
    Rule(
        "reward_confined_unused",
        lambda c: not c.method.reward_confined and not any("." in name for name in c.method.rewards),
        lambda c: "method.reward_confined=false without a function of your own in method.rewards: it would be ignored",
        lambda c: "'+method.rewards={package.module.function: 1.0}', or no method.reward_confined",
    ),
    Rule(
        "reward_column",
        lambda c: bool(_without_column(c)),
        lambda c: f"method.rewards.{_without_column(c)[0]} with data={c.data.name}: its rows lack what this reward reads",
        _with_column,
    ),
    Rule(
        "pairs_of_code",
        lambda c: c.data.kind == "code" and c.method.name == "dpo",
        lambda c: "data=code with method=dpo: it makes no preference pairs",
        lambda c: "data=jsonl with pairs of your own, or method=sft or grpo",
    ),
    Rule(
        "evaluation_of_code",
        lambda c: c.data.kind == "code" and c.method.name == "evaluate" and not c.method.rewards,
        lambda c: "data=code with method=evaluate and no rewards: it compares answers, and many programs are right",
        lambda c: "+method.rewards.code_tests=1.0, which runs their tests",
    ),
    Rule(
        "sandbox_unused",
        lambda c: c.method.sandbox != Sandbox() and not sandbox.needed(c),
        lambda c: "method.sandbox without the reward code_tests: it would be ignored",
        lambda c: "+method.rewards.code_tests=1.0, or no method.sandbox",
    ),
    Rule(
        "sandbox_under_slurm",
        lambda c: sandbox.needed(c) and c.runtime.name == "slurm",
        lambda c: "method.rewards.code_tests under runtime=slurm: code runs in containers beside the run, and a job rarely has an engine",
        lambda c: "runtime=local or runtime=docker on a machine with a docker engine",
    ),
]
