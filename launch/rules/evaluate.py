"""Define rules about evaluations, samples, and RAFT's cycles."""

from __future__ import annotations

import math
import re

from launch.machine import placement
from launch.rules.data import LENGTHS
from launch.rules.rule import Rule
from launch.rules.selection import has_heldout
from launch.schema import Config
from launch.schema.enums import Init
from launch.schema.trainer_args import argument

OF_CYCLES = ("cycle", "num_cycles")  # set by method=raft for each of its phases
COMMIT = re.compile(r"[0-9a-f]{40}")


def lacks_heldout(config: Config) -> bool:
    """Return whether an evaluation has neither held-out rows nor tasks of lm-evaluation-harness."""
    return (
        config.method.measures_model
        and not has_heldout(config)
        and not argument(config, "lm_eval_tasks")
    )


def evaluate_warnings(config: Config) -> list[str]:
    """Return warnings about idle ranks or GPUs, and about filters that an evaluation does not read.

    Ranks share batches, but not the tasks of the harness. Filters may be a pipeline's, for its
    trainings.
    """
    if not config.method.measures_model:
        return []
    ranks, found = placement.num_trainers(config), []
    unread = [name for name in LENGTHS if getattr(config.data.filter, name) is not None]
    if unread:
        found.append(
            f"data.filter.{', '.join(unread)}: lengths in tokens, which differ by model, leave "
            "no held-out problem out."
        )
    if ranks == 1 and config.hardware.gpus_per_node > 1:
        found.append(
            f"topology=single: one of the node's {config.hardware.gpus_per_node} GPUs "
            "evaluates, the others stay idle."
        )
    if ranks > 1 and argument(config, "lm_eval_tasks"):
        found.append(
            f"method.args.lm_eval_tasks: the first of {ranks} ranks asks them alone, the "
            "others have ended by then."
        )
    problems = (
        min(filter(None, (config.data.limit, config.data.num_heldout)), default=0)
        if config.data.num_heldout
        else 0
    )
    batches = math.ceil(problems / int(argument(config, "batch_size")))
    if 0 < batches < ranks:
        found.append(
            f"{problems} held-out problems in batches of {argument(config, 'batch_size')}: "
            f"{ranks - batches} of {ranks} ranks stay idle; "
            f"method.args.batch_size={math.ceil(problems / ranks)} gives each one."
        )
    return found


def _may_be_another_model_tomorrow(config: Config) -> bool:
    model = config.model
    asks = argument(config, "engine") is not None or config.method.has_cycles
    # without a revision, rule model_revision warns
    is_pinned = model.revision is None or COMMIT.fullmatch(model.revision)
    return asks and model.path is None and model.init == Init.pretrained and not is_pinned


def _owned(config: Config) -> list[str]:
    given = argument(config, "sample") if config.method.has_cycles else None
    return [name for name in OF_CYCLES if name in (given or {})]


EVALUATE_RULES = [
    Rule(
        "evaluation_data",
        lacks_heldout,
        lambda c: f"method=evaluate with data={c.data.name}: no held-out problems",
        "data.num_heldout=, data.heldout_path=, data.heldout_split= or data.heldout_fraction=",
    ),
    Rule(
        "evaluated_revision",
        _may_be_another_model_tomorrow,
        lambda c: f"model.revision={c.model.revision} may move, and answers are kept by it",
        "a commit of the hub, 40 hexadecimal digits, or model.path=<directory>",
    ),
    Rule(
        "raft_decides",
        lambda c: bool(_owned(c)),
        lambda c: f"method.args.sample.{_owned(c)[0]}: RAFT counts its cycles itself",
        "method.args.cycles=N, or method=sample by itself",
    ),
]
