"""Define rules about rewards and the sandbox."""

from __future__ import annotations

from launch.core.errors import near
from launch.rules.rule import Rule
from launch.schema import Config, trainer_args
from launch.schema.enums import Use

READS_COLUMN = ("accuracy", "reasoning_gym", "regex", "code_tests")
GENERATED = {
    "reasoning": ("accuracy", "reasoning_gym"),
    "code": ("code_tests",),
}  # kind of rows -> the rewards whose column they have


def _names() -> str:
    return ", ".join(trainer_args.lock()["rewards"])


def _unknown(config: Config) -> list[str]:
    return [
        name
        for name in config.method.rewards
        if "." not in name and name not in trainer_args.lock()["rewards"]
    ]


def _stray(config: Config) -> list[str]:
    """Return names in the chain that are not in method.rewards or that repeat."""
    chain = config.method.reward_chain
    return [
        name
        for i, name in enumerate(chain)
        if name not in config.method.rewards or name in chain[:i]
    ]


def _without_column(config: Config, kind: str | None = None) -> list[str]:
    """Return named rewards whose column generated rows of this kind do not have.

    The columns of a file or the hub are known only later.
    """
    has = GENERATED.get(kind or config.data.kind)
    if has is None:
        return [
            name for name in config.method.rewards if name == "reasoning_gym"
        ]  # this one reads the record of reasoning-gym's own task
    has = (*has, "regex") if config.method.reward_pattern is not None else has
    return [name for name in config.method.rewards if name in READS_COLUMN and name not in has]


def _fitting(config: Config) -> str:
    """Return a reward that can judge these rows."""
    return "code_tests" if config.data.kind == "code" else "accuracy"


def _with_column(config: Config) -> str:
    """Return remedies: other data, a pattern for all rows, or a reward that can judge them."""
    refused, fitting = _without_column(config), _fitting(config)
    ways = [f"data={kind}" for kind in GENERATED if not _without_column(config, kind)]
    ways += [r"method.reward_pattern='\d+'"] if refused[0] == "regex" else []
    reads = "runs the rows' tests" if fitting == "code_tests" else "reads a column answer"
    is_left = any(name in READS_COLUMN and name not in refused for name in config.method.rewards)
    instead = "" if is_left else f" +method.rewards.{fitting}=1.0, which {reads}"
    return ", or ".join([*ways, f"'~method.rewards.{refused[0]}'{instead}"])


def _weighted(config: Config) -> str:
    name = next(iter(config.method.rewards), _fitting(config))
    return f"method.rewards.{name}=1.0; named rewards: {_names()}"


REWARD_RULES = [
    Rule(
        "rewards_needed",
        lambda c: (
            (c.method.uses_rewards is Use.required or bool(c.method.rewards))
            and not any(c.method.rewards.values())
        ),
        lambda c: f"method.rewards={c.method.rewards}: no reward has a weight",
        _weighted,
    ),
    Rule(
        "reward_unknown",
        lambda c: bool(_unknown(c)),
        lambda c: (
            f"method.rewards.{_unknown(c)[0]}: no such "
            f"reward.{near(_unknown(c)[0], trainer_args.lock()['rewards'])}"
        ),
        lambda c: f"{_names()}, or the dotted path of your function (package.module.function)",
    ),
    Rule(
        "reward_negative",
        lambda c: not c.method.trains and any(weight < 0 for weight in c.method.rewards.values()),
        lambda c: f"method.rewards={c.method.rewards}: no sample could have the full score of 1",
        "weights of 0 or more, or method=grpo",
    ),
    Rule(
        "reward_chain",
        lambda c: bool(_stray(c)),
        lambda c: f"method.reward_chain: {_stray(c)[0]} is not in method.rewards, or repeats",
        lambda c: f"each of {', '.join(c.method.rewards) or 'the rewards'} at most once",
    ),
    Rule(
        "reward_column",
        lambda c: bool(_without_column(c)),
        lambda c: (
            f"method.rewards.{_without_column(c)[0]} with data={c.data.name}: its rows lack "
            "what this reward reads"
        ),
        _with_column,
    ),
]
