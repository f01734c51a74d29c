"""The phases of a pipeline as the launcher plans them, run in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator

from omegaconf import OmegaConf

from launch.plan import Plan, rank_config
from recipes.common import program
from recipes.dpo import dpo
from recipes.evaluate import evaluate
from recipes.grpo import grpo
from recipes.sample import sample
from recipes.sft import sft

WORK = {"sft": sft, "dpo": dpo, "grpo": grpo, "sample": sample, "evaluate": evaluate}


def run(plans: dict[str, Plan]) -> Iterator[tuple[str, dict]]:
    """(phase, its result.json with `code`) of each in turn, up to the first that fails; one that is done already is not run again."""
    for name, plan in plans.items():
        result = plan.run_dir / "result.json"
        code = 0
        if not (result.is_file() and json.loads(result.read_text())["status"] == "done"):
            plan.run_dir.mkdir(parents=True, exist_ok=True)
            (plan.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
            code = program.run(WORK[plan.config.method.name], ["--config", str(plan.run_dir / "config.yaml")])
        yield name, {**json.loads(result.read_text()), "code": code}
        if code:
            return
