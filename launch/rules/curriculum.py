"""Rows of check.py's table about the order of rows, their packing, and the learning rate's scaling."""

from __future__ import annotations

from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.data import Curriculum, CurriculumArgs, LrScaling
from launch.trainer_args import argument

ORDERED = ("sft", "grpo")  # methods with a curriculum
READ_BY = {"earlier": Curriculum.mixed, "floor": Curriculum.adaptive, "memory": Curriculum.adaptive}


def _unread_argument(config: Config) -> str | None:
    given, standard = config.data.curriculum_args, CurriculumArgs()
    changed = [name for name in READ_BY if getattr(given, name) != getattr(standard, name)]
    # Only grpo sees pass rates change on the way, and has some to remember.
    return next((n for n in changed if config.data.curriculum != READ_BY[n] or (n == "memory" and config.method.name != "grpo")), None)


def _share_out_of_range(config: Config) -> str | None:
    args = config.data.curriculum_args
    # A floor of 0 leaves no weight at all once every level is solved, or hopeless.
    return next((name for name in READ_BY if not 0 <= getattr(args, name) < 1 or (name == "floor" and args.floor == 0)), None)


def _steps(config: Config) -> int:
    return int(argument(config, "max_steps") or -1)


CURRICULUM_RULES = [
    Rule(
        "curriculum_method",
        lambda c: c.data.curriculum != Curriculum.none and c.method.kind == "trainer" and c.method.name not in ORDERED,
        lambda c: f"data.curriculum={c.data.curriculum.value} with method={c.method.name}: it takes rows as they are",
        lambda c: f"method={', '.join(ORDERED)}, sample or raft, or data.curriculum=none",
    ),
    Rule(
        "curriculum_steps",
        lambda c: c.data.curriculum != Curriculum.none and c.method.name in ORDERED and _steps(c) < 1,
        lambda c: f"data.curriculum={c.data.curriculum.value} without method.args.max_steps: its stages are parts of the run",
        lambda c: "method.args.max_steps=1000",
    ),
    Rule(
        "curriculum_packing",
        lambda c: c.data.curriculum != Curriculum.none and bool(argument(c, "packing")),
        lambda c: f"data.curriculum={c.data.curriculum.value} with method.args.packing=true: a packed row has many levels",
        lambda c: "method.args.packing=false",
    ),
    Rule(
        "packing_length",
        lambda c: bool(argument(c, "packing")) and argument(c, "max_length") is None,
        lambda c: "method.args.packing=true with max_length=null: rows are packed up to max_length",
        lambda c: "method.args.max_length=1024, or method.args.packing=false",
    ),
    Rule(
        "curriculum_pass_rates",
        lambda c: c.data.curriculum == Curriculum.adaptive and c.method.name == "sft" and not c.data.pass_rates,
        lambda c: "data.curriculum=adaptive with method=sft: nothing is generated, so no pass rates are measured on the way",
        lambda c: "data.pass_rates=<result.json of an evaluation>, or data.curriculum=progressive",
    ),
    Rule(
        "pass_rates_unused",
        lambda c: bool(c.data.pass_rates) and c.data.curriculum != Curriculum.adaptive,
        lambda c: f"data.pass_rates={c.data.pass_rates} with data.curriculum={c.data.curriculum.value}: it would be ignored",
        lambda c: "data.curriculum=adaptive",
    ),
    Rule(
        "curriculum_args_unused",
        lambda c: _unread_argument(c) is not None,
        lambda c: (
            f"data.curriculum_args.{_unread_argument(c)} with data.curriculum={c.data.curriculum.value} and method={c.method.name}: "
            "it would be ignored"
        ),
        lambda c: f"data.curriculum={READ_BY[str(_unread_argument(c))].value}{' with method=grpo' * (_unread_argument(c) == 'memory')}",
    ),
    Rule(
        "curriculum_args",
        lambda c: _share_out_of_range(c) is not None,
        lambda c: (
            f"data.curriculum_args.{_share_out_of_range(c)}={getattr(c.data.curriculum_args, str(_share_out_of_range(c))):g}: a share"
        ),
        lambda c: "at least 0 (floor: above 0) and below 1",
    ),
    Rule(
        "lr_scaling",
        lambda c: (c.method.lr_scaling != LrScaling.none) != (c.method.lr_reference_batch is not None),
        lambda c: f"method.lr_scaling={c.method.lr_scaling.value} with method.lr_reference_batch={c.method.lr_reference_batch}",
        lambda c: "both, for example method.lr_scaling=sqrt method.lr_reference_batch=32, or none of them",
    ),
    Rule(
        "lr_scaling_unused",
        lambda c: c.method.lr_scaling != LrScaling.none and c.method.kind != "trainer",
        lambda c: f"method.lr_scaling={c.method.lr_scaling.value} with method={c.method.name}: it has no learning rate of its own",
        lambda c: "method.lr_scaling=none",
    ),
]
