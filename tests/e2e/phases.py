"""Phases of a pipeline, and benchmarks of one rank, as the launcher plans them, run in this process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from launch.compose import compose
from launch.plan import Plan, make_plan, prepare, rank_config
from recipes.common import program
from recipes.dpo import dpo
from recipes.evaluate import evaluate
from recipes.grpo import grpo
from recipes.sample import sample
from recipes.sft import sft
from tests.conftest import host_with

WORK = {"sft": sft, "dpo": dpo, "grpo": grpo, "sample": sample, "evaluate": evaluate}


def run(plans: dict[str, Plan]) -> Iterator[tuple[str, dict]]:
    """(phase, its result.json with `code`) of each in turn, up to the first that fails; one that is done already is not run again."""
    for name, plan in plans.items():
        result = plan.run_dir / "result.json"
        code = 0
        if not (result.is_file() and json.loads(result.read_text())["status"] == "done"):
            code = program.run(WORK[plan.config.method.name], ["--config", str(written(plan))])
        yield name, {**json.loads(result.read_text()), "code": code}
        if code:
            return


def written(plan: Plan) -> Path:
    """The config.yaml of its ranks."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    path = plan.run_dir / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
    return path


def benchmark(run_dir: Path, name: str, *overrides: str) -> tuple[dict, list[dict]]:
    """result.json and metrics.jsonl of a smoke run of method=bench/<name> by one rank."""
    given = ["hardware=mi350x", f"method=bench/{name}", "smoke=true", "topology=single", *overrides]
    config, _ = prepare(compose(given))
    plan = make_plan(config, host_with(0), run_dir)
    assert [process.argv[-3] for process in plan.processes] == [f"recipes.bench.{name}"]
    work = getattr(importlib.import_module(f"recipes.bench.{name}"), name)
    assert program.run(work, ["--config", str(written(plan))]) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return json.loads((run_dir / "result.json").read_text()), [json.loads(line) for line in lines]
