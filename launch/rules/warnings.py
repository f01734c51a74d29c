"""Return warnings for every plan about settings that work but cost something."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.config.conditions import all_met, table
from launch.machine import placement
from launch.rules.setting_rules import FACTS, board
from launch.schema import Config
from launch.schema.trainer_args import argument

ALWAYS = {"method.name": "given"}
# lengths in data.filter, in tokens, which only trainings read
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")


def rule_warnings(c: Config) -> list[str]:
    ranks = placement.trainers_of_a_node(c)
    lines = [
        row["text"].format(config=c, ranks=ranks, board=board(c))
        for row in table(__file__, "warnings")
        if all_met(c, row["when"], FACTS)
        and any(all_met(c, dict([item]), FACTS) for item in row.get("any", ALWAYS).items())
    ]
    return [*lines, *_of_steps(c), *_of_evaluation(c)]


def _of_steps(c: Config) -> Iterator[str]:
    keys = [f"step.{name}" for name, value in vars(c.step).items() if value is not None]
    if keys and not (c.method.trains or c.method.tunes or c.method.has_cycles):
        yield (
            f"{', '.join(keys)}: method={c.method.name} takes no optimizer steps, so they take no "
            "effect."
        )


def _of_evaluation(c: Config) -> Iterator[str]:
    """Yield warnings about idle ranks, and filters that an evaluation does not read.

    Filters may be a pipeline's, for its trainings.
    """
    if not c.method.measures_model:
        return
    ranks, unread = placement.num_trainers(c), [n for n in LENGTHS if getattr(c.data.filter, n)]
    if unread:
        yield (
            f"data.filter.{', '.join(unread)}: lengths in tokens, which differ by model, do not "
            "remove held-out problems."
        )
    problems = c.data.num_heldout and min(c.data.num_heldout, c.data.limit or c.data.num_heldout)
    size = int(argument(c, "batch_size"))
    batches = math.ceil(problems / size)
    if 0 < batches < ranks:
        yield (
            f"{problems} held-out problems in batches of {size}: {ranks - batches} of {ranks} "
            f"ranks stay idle; method.args.batch_size={math.ceil(problems / ranks)} gives each one."
        )
