"""Reject compositions that cannot work by a table of rules, tested row by row.

Rules read the composition and conf/. Checks that read other files are in
launch/plan/check_files.py.
"""

from __future__ import annotations

from launch.core.errors import UserError
from launch.inputs import engine_args
from launch.machine import masks
from launch.rules.adapters import ADAPTER_RULES
from launch.rules.batch import BATCH_RULES
from launch.rules.bench import BENCH_RULES
from launch.rules.bounds import BOUND_RULES
from launch.rules.conflicts import CONFLICT_RULES
from launch.rules.data import DATA_RULES
from launch.rules.evaluate import EVALUATE_RULES
from launch.rules.export import EXPORT_RULES
from launch.rules.model import MODEL_RULES
from launch.rules.precision import PRECISION_RULES
from launch.rules.rewards import REWARD_RULES
from launch.rules.rule import Rule
from launch.rules.runtime import RUNTIME_RULES
from launch.rules.selection import SELECTION_RULES
from launch.rules.slurm import SLURM_RULES
from launch.rules.step import STEP_RULES
from launch.rules.tasks import TASK_RULES
from launch.rules.topology import TOPOLOGY_RULES
from launch.rules.unread import UNREAD_RULES
from launch.rules.values import check_values
from launch.schema import Config, trainer_args
from launch.schema.variables import SECRET

RULES = [
    *PRECISION_RULES,
    *CONFLICT_RULES,
    *BOUND_RULES,
    *STEP_RULES,
    *ADAPTER_RULES,
    *BENCH_RULES,
    *EVALUATE_RULES,
    *EXPORT_RULES,
    *TOPOLOGY_RULES,
    *SELECTION_RULES,
    *BATCH_RULES,
    *REWARD_RULES,
    Rule(
        "secret",
        lambda c: bool(_secrets(c)),
        lambda c: f"{_secrets(c)[0]}: the run's records would hold a secret",
        "a variable of your shell (export HF_TOKEN=...), which the processes inherit",
    ),
    Rule(
        "mask_in_user_env",
        lambda c: any(name in c.user_env for name in masks.ALL),
        "user_env: a GPU mask would give every process the same GPUs",
        "HIP_VISIBLE_DEVICES=2,3 in your shell",
    ),
    *MODEL_RULES,
    *DATA_RULES,
    *TASK_RULES,
    *RUNTIME_RULES,
    *SLURM_RULES,
    *UNREAD_RULES,
]


def _secrets(config: Config) -> list[str]:
    """Return the keys named like a secret that have a value."""
    mappings = {
        "user_env": config.user_env,
        "method.args": config.method.args,
        engine_args.KEY: config.topology.server_args,
    }
    return [
        key
        for group, values in mappings.items()
        for name, value in values.items()
        if value and isinstance(value, str) and SECRET.search(key := f"{group}.{name}")
    ]


def refusals(config: Config) -> list[Rule]:
    """Return every rule that rejects this composition."""
    return [rule for rule in RULES if rule.applies(config)]


def check_given(config: Config) -> None:
    """Raise UserError for a value or an argument that is wrong by itself."""
    check_values(config)
    trainer_args.check(config)
    engine_args.check(config)


def check(config: Config) -> None:
    """Raise UserError for wrong arguments, else for every rule that rejects the composition."""
    check_given(config)
    if rules := refusals(config):
        raise UserError("\n".join(rule.refusal(config) for rule in rules))
