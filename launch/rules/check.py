"""Reject compositions that cannot work.

Rules read only the composition and conf/. launch/plan/check_files.py checks other files.
"""

from __future__ import annotations

from launch.core.errors import UserError
from launch.inputs import engine_args
from launch.rules.data import heldout_faults, source_faults, task_faults
from launch.rules.limits import limit_faults
from launch.rules.method import method_faults
from launch.rules.model import model_faults
from launch.rules.refusal import Refusal
from launch.rules.rewards import reward_faults
from launch.rules.runtime import secret_faults, slurm_faults
from launch.rules.setting_rules import conflicts, unread
from launch.rules.topology import group_faults, server_faults
from launch.rules.values import check_values
from launch.schema import Config, trainer_args

RULES = (
    limit_faults,
    conflicts,
    group_faults,
    method_faults,
    server_faults,
    heldout_faults,
    reward_faults,
    secret_faults,
    model_faults,
    source_faults,
    task_faults,
    slurm_faults,
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
    if faults := refusals(config):
        raise UserError("\n".join(map(str, faults)))
