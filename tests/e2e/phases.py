"""Run planned phases of a pipeline, and benchmarks of one rank, in this process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from launch.config.compose import compose
from launch.plan.planning import make_plan, prepare, rank_config
from launch.schema.plan import Plan
from recipes.dpo import dpo
from recipes.evaluate import evaluate
from recipes.grpo import grpo
from recipes.rank import program
from recipes.sample import sample
from recipes.sft import sft
from tests.conftest import host_with

WORK = {"sft": sft, "dpo": dpo, "grpo": grpo, "sample": sample, "evaluate": evaluate}


def run(plans: dict[str, Plan]) -> Iterator[tuple[str, dict]]:
    """Yield (phase, its result.json with `code`) of each in turn, up to the first that fails.

    A phase that is done is not run again.
    """
    for name, plan in plans.items():
        result = plan.run_dir / "result.json"
        code = 0
        if not (result.is_file() and json.loads(result.read_text())["status"] == "done"):
            code = program.run(WORK[plan.config.method.name], ["--config", str(written(plan))])
        yield name, {**json.loads(result.read_text()), "code": code}
        if code:
            return


def written(plan: Plan) -> Path:
    """Write the config.yaml of a plan's ranks, and return its path."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    path = plan.run_dir / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(rank_config(plan))))
    return path


def configure_benchmark(run_dir: Path, name: str, *overrides: str) -> Path:
    """Return the config.yaml of a smoke run of method=bench/<name>."""
    arguments = ["hardware=mi350x", f"method=bench/{name}", "smoke=true", *overrides]
    config, _ = prepare(compose(arguments))
    plan = make_plan(config, host_with(0), run_dir)
    assert [process.argv[-3] for process in plan.processes] == [config.method.program]
    return written(plan)


def benchmark(run_dir: Path, name: str, *overrides: str) -> tuple[dict, list[dict]]:
    """Return result.json and metrics.jsonl of method=bench/<name>, a smoke run of one rank."""
    path = configure_benchmark(run_dir, name, "topology=single", *overrides)
    module = OmegaConf.load(path).method.program
    work = getattr(importlib.import_module(module), name)
    assert program.run(work, ["--config", str(path)]) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return json.loads((run_dir / "result.json").read_text()), [json.loads(line) for line in lines]


def check_rows(name: str, count: int, result: dict, lines: list[dict]) -> None:
    """Assert that a training benchmark measured all rows except fp8, which is not available."""
    assert result["benchmark"] == name
    assert len(result["rows"]) == len(lines) == count
    for row in result["rows"]:
        if row.get("precision") == "fp8":
            assert "no fp8" in row["error"]
        else:
            assert row["error"] is None
            assert row[result["figure"]] > 0
