"""Reject rewards that do not exist, have no weight, or cannot judge the rows."""

from __future__ import annotations

from collections.abc import Iterator

from launch.rules.refusal import Refusal
from launch.schema import Config, trainer_args
from launch.schema.enums import Use

READS_COLUMN = ("accuracy", "reasoning_gym", "regex", "code_tests")
# kind of rows -> the rewards whose column they have
GENERATED = {"reasoning": ("accuracy", "reasoning_gym"), "code": ("code_tests",)}


def reward_faults(c: Config) -> Iterator[Refusal]:
    rewards, chain, names = c.method.rewards, c.method.reward_chain, trainer_args.lock()["rewards"]
    fitting = "code_tests" if c.data.kind == "code" else "accuracy"
    setting = f"method.rewards={rewards}"
    if (c.method.uses_rewards is Use.required or rewards) and not any(rewards.values()):
        remedy = f"method.rewards.{next(iter(rewards), fitting)}=1.0; named rewards: "
        yield Refusal(
            "rewards_needed", f"{setting}: no reward has a weight", remedy + ", ".join(names)
        )
    if not c.method.trains and any(weight < 0 for weight in rewards.values()):
        message = f"{setting}: no sample could reach the full score of 1"
        yield Refusal("reward_negative", message, "weights of 0 or more, or method=grpo")
    repeated = [name for i, name in enumerate(chain) if name not in rewards or name in chain[:i]]
    if repeated:
        message = f"method.reward_chain: {repeated[0]} is not in method.rewards, or repeats"
        remedy = f"each of {', '.join(rewards) or 'the rewards'} at most once"
        yield Refusal("reward_chain", message, remedy)
    if blind := _without_column(c, c.data.kind):
        ways = [f"data={kind}" for kind in GENERATED if not _without_column(c, kind)]
        ways += [r"method.reward_pattern='\d+'"] if blind[0] == "regex" else []
        is_left = any(name in READS_COLUMN and name not in blind for name in rewards)
        instead = "" if is_left else f" +method.rewards.{fitting}=1.0"
        remedy = ", or ".join([*ways, f"'~method.rewards.{blind[0]}'{instead}"])
        message = f"method.rewards.{blind[0]} with data={c.data.name}: its rows lack what it reads"
        yield Refusal("reward_column", message, remedy)


def _without_column(config: Config, kind: str) -> list[str]:
    """Return named rewards whose column generated rows of this kind do not have.

    The columns of a file or the hub are known only later, but none has reasoning-gym's own record.
    """
    has = GENERATED.get(kind, ("accuracy", "regex", "code_tests"))
    has = (*has, "regex") if config.method.reward_pattern is not None else has
    return [name for name in config.method.rewards if name in READS_COLUMN and name not in has]
