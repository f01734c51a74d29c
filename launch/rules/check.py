"""Reject compositions that cannot work.

Rules read only the composition and conf/. launch/plan/check_files.py checks other files.
"""

from __future__ import annotations

from launch.core.errors import UserError
from launch.inputs import engine_args
from launch.rules.data import heldout_problems, source_problems, task_problems
from launch.rules.limits import limit_problems
from launch.rules.method import generation_problems, method_problems
from launch.rules.model import model_problems
from launch.rules.optimizers import optimizer_problems
from launch.rules.refusal import Refusal
from launch.rules.rewards import reward_problems
from launch.rules.runtime import secret_problems, slurm_problems
from launch.rules.setting_rules import conflicts, unread
from launch.rules.topology import group_problems, server_problems
from launch.rules.values import check_values
from launch.schema import Config, trainer_args

RULES = (
    limit_problems,
    conflicts,
    group_problems,
    method_problems,
    generation_problems,
    optimizer_problems,
    server_problems,
    heldout_problems,
    reward_problems,
    secret_problems,
    model_problems,
    source_problems,
    task_problems,
    slurm_problems,
    unread,
)


def refusals(config: Config) -> list[Refusal]:
    """Return the refusals of a composition: the first of each rule, and all of `unread`."""
    all_refusals = [refusal for rule in RULES for refusal in rule(config)]
    names = [refusal.name for refusal in all_refusals]
    return [r for i, r in enumerate(all_refusals) if r.name == "unread" or r.name not in names[:i]]


def check_settings(config: Config) -> None:
    """Raise UserError for a value or an argument that is wrong in any composition."""
    check_values(config)
    trainer_args.check(config)
    engine_args.check(config)


def check(config: Config) -> None:
    """Raise UserError for the first wrong value, or else with the messages of all refusals."""
    check_settings(config)
    if problems := refusals(config):
        raise UserError("\n".join(map(str, problems)))
