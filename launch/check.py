"""What cannot work, refused when it is composed: a table of (applies, message, remedy), tested row by row.

`{...}` in a message is filled from the composition. Rules look at that and at conf/; what needs other files stands in files/check_files.py.
"""

from __future__ import annotations

import re

from launch import engine_args, trainer_args
from launch.environment import SECRET
from launch.errors import UserError
from launch.machine import masks
from launch.rules.adapters import ADAPTER_RULES
from launch.rules.batch import BATCH_RULES
from launch.rules.bench import BENCH_RULES
from launch.rules.curriculum import CURRICULUM_RULES
from launch.rules.cycles import CYCLE_RULES
from launch.rules.data import DATA_RULES
from launch.rules.evaluate import EVALUATE_RULES
from launch.rules.export import EXPORT_RULES
from launch.rules.model import MODEL_RULES
from launch.rules.precision import PRECISION_RULES
from launch.rules.profile import PROFILE_RULES
from launch.rules.rewards import REWARD_RULES
from launch.rules.rule import Rule
from launch.rules.runtime import RUNTIME_RULES
from launch.rules.save import SAVE_RULES
from launch.rules.selection import SELECTION_RULES
from launch.rules.step import STEP_RULES
from launch.rules.tasks import TASK_RULES
from launch.rules.topology import TOPOLOGY_RULES
from launch.rules.tune import TUNE_RULES
from launch.rules.values import check_values
from launch.schema import Config
from launch.schema.enums import Find, Mode

SEARCH = Rule(
    "find",
    lambda c: c.find != Find.none and c.mode != Mode.plan,
    lambda c: f"find={c.find.value}: a search with the planner, which starts nothing",
    lambda c: f"mode=plan find={c.find.value}",
)
NAME = Rule(
    "name",
    lambda c: bool(c.name) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", str(c.name)),
    lambda c: f"name={c.name}: it names a directory",
    lambda c: "letters, digits, '.', '_' and '-', at most 100 of them",
)
RULES = [
    *PRECISION_RULES,
    *STEP_RULES,
    *ADAPTER_RULES,
    *BENCH_RULES,
    *TUNE_RULES,
    *EVALUATE_RULES,
    *EXPORT_RULES,
    *CYCLE_RULES,
    *SAVE_RULES,
    *TOPOLOGY_RULES,
    *PROFILE_RULES,
    *SELECTION_RULES,
    *BATCH_RULES,
    *REWARD_RULES,
    NAME,
    Rule(
        "secret",
        lambda c: bool(_secrets(c)),
        lambda c: f"{_secrets(c)[0]}: a secret in a composition ends in its records",
        lambda c: "a variable of your shell (export HF_TOKEN=...), which the processes inherit",
    ),
    Rule(
        "seed",
        lambda c: not 0 <= c.seed < 2**32,
        lambda c: f"seed={c.seed}: NumPy takes 0 to 4294967295",
        lambda c: "seed=0",
    ),
    Rule(
        "mask_in_user_env",
        lambda c: any(name in c.user_env for name in masks.ALL),
        lambda c: f"user_env.{next(n for n in masks.ALL if n in c.user_env)}: every process would get the same GPUs",
        lambda c: "the variable in your shell (HIP_VISIBLE_DEVICES=2,3 python launch/run.py ...), which is shared out",
    ),
    *MODEL_RULES,
    SEARCH,
    *DATA_RULES,
    *CURRICULUM_RULES,
    *TASK_RULES,
    *RUNTIME_RULES,
]


def _secrets(config: Config) -> list[str]:
    """Keys that hold a secret and have a value."""
    free = {"user_env": config.user_env, "method.args": config.method.args, engine_args.KEY: config.topology.server_args}
    named = {f"{group}.{name}": given for group, values in free.items() for name, given in values.items()}
    return [key for key, given in named.items() if given and SECRET.search(key) and isinstance(given, str)]


def refusals(config: Config) -> list[Rule]:
    """Every rule that refuses this composition."""
    return [rule for rule in RULES if rule.applies(config)]


def check_given(config: Config) -> None:
    """Raises UserError for a value or an argument that is wrong by itself."""
    check_values(config)
    trainer_args.check(config)
    engine_args.check(config)


def check(config: Config) -> None:
    """Raises UserError with every refusal of the table, after the method's arguments."""
    check_given(config)
    found = refusals(config)
    if found:
        raise UserError("\n".join(rule.refusal(config) for rule in found))
