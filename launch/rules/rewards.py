"""Reject rewards without a weight, wrong chains, and rewards whose column the rows lack."""

from __future__ import annotations

from collections.abc import Iterator

from launch.rules.refusal import Refusal
from launch.schema import Config, trainer_args
from launch.schema.enums import Use

# kind of generated rows -> the rewards whose column they have
GENERATED = {"reasoning": ("accuracy", "reasoning_gym"), "code": ("code_tests",)}


def reward_problems(c: Config) -> Iterator[Refusal]:
    rewards, chain, names = c.method.rewards, c.method.reward_chain, trainer_args.lock()["rewards"]
    fitting = "code_tests" if c.data.kind == "code" else "accuracy"
    setting = f"method.rewards={rewards}"
    if (c.method.uses_rewards is Use.required or rewards) and not any(rewards.values()):
        remedy = f"method.rewards.{next(iter(rewards), fitting)}=1.0; all rewards: "
        yield Refusal("rewards_needed", f"{setting}: every weight is 0", remedy + ", ".join(names))
    if not c.method.trains and any(weight < 0 for weight in rewards.values()):
        message = f"{setting}: with a negative weight, no sample reaches the full score of 1"
        yield Refusal("reward_negative", message, "weights of 0 or more, or method=grpo")
    repeated = [name for i, name in enumerate(chain) if name not in rewards or name in chain[:i]]
    if repeated:
        message = f"method.reward_chain: {repeated[0]} is repeated or not in method.rewards"
        remedy = f"each of {', '.join(rewards) or 'the rewards'} at most once"
        yield Refusal("reward_chain", message, remedy)
    if unusable := _without_column(c, c.data.kind):
        remedies = [f"data={kind}" for kind in GENERATED if not _without_column(c, kind)]
        remedies += [r"method.reward_pattern='\d+'"] if unusable[0] == "regex" else []
        is_usable = any(names.get(name) and name not in unusable for name in rewards)
        replacement = "" if is_usable else f" +method.rewards.{fitting}=1.0"
        other = f"'~method.rewards.{unusable[0]}'{replacement}"
        if fitting in unusable:  # no reward of ours can compare answers
            other = "'method.rewards={<module>.<function>: 1.0}'"
        remedy = ", or ".join([*remedies, other])
        message = f"method.rewards.{unusable[0]}: rows of data={c.data.name} have no column for it"
        yield Refusal("reward_column", message, remedy)


def _without_column(config: Config, kind: str) -> list[str]:
    """Return the named rewards that read a column that rows of this kind lack.

    Rows from files and the Hub may have every column except reasoning-gym's, and those that
    data.columns sets to null.
    """
    usable = GENERATED.get(kind, ("accuracy", "regex", "code_tests"))
    usable = (*usable, "regex") if config.method.reward_pattern is not None else usable
    columns, data = trainer_args.lock()["rewards"], config.data
    absent = [f for f, name in data.columns.items() if name is None and kind == data.kind]
    return [
        name
        for name in config.method.rewards
        if columns.get(name) and (name not in usable or columns[name] in absent)
    ]
