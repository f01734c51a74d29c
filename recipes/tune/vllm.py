"""Arguments of vLLM's engine that give the most tokens a second: an Optuna search over method=bench/vllm.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=tune/vllm model=qwen3_8b
    No hub:  python launch/run.py hardware=mi350x topology=single method=tune/vllm model=qwen3_8b model.init=random

A trial starts vLLM's own benchmark with one set of arguments, and reports after each pair of lengths, the shortest first: one that is
behind is given up there. Its figure is the geometric mean of output tokens a second over the lengths.

Beside the experiment of the benchmark it leaves one for whatever generates: conf/experiment/tuned_engine_<model>_<hardware>.yaml.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from recipes.bench import vllm_arguments
from recipes.bench.series import Column, Row, Table
from recipes.common.errors import UserError
from recipes.common.program import is_main_rank, main, say
from recipes.tune import trial
from recipes.tune.search import Point, Pruned, Report, SearchConfig, search, set_only
from recipes.tune.trial import Setting
from recipes.tune.tuning import finish, start_of

FIGURE = "output_tokens_per_second"
SHARE = "gpu_memory_utilization"  # topology.server_memory_share, where models generate
# What keys of the run decide there: GPUs of an engine, its dtype, and its longest sequence.
OF_A_RUN = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "dtype", "max_model_len")


@dataclass
class VllmConfig(SearchConfig):
    """`space`: values of vLLM's arguments, named as in bench/vllm."""

    recipe: str = "bench/vllm"
    space: dict[str, list[Any]] = field(default_factory=dict, metadata={"refused": vllm_arguments.REFUSED})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe != "bench/vllm":
            raise UserError(f"method.args.recipe={self.recipe}: tune/vllm measures bench/vllm. Leave it out.")
        for name in self.space:
            vllm_arguments.check({name: None} if name != "instances" else {}, "method.args.space")


def vllm(config: DictConfig) -> dict[str, Any]:
    args = VllmConfig(**OmegaConf.to_container(config.trainer_args))
    if not is_main_rank():  # the trials have ranks of their own, on the same GPUs
        return {}
    table = Table(
        "vllm", figure=FIGURE, columns=[Column("trial", "trial"), Column("setting", "setting"), Column(FIGURE, "output tokens/s", 0)]
    )
    base = OmegaConf.to_container(config.tuned.trainer_args.base)
    rows = search(config, args, table, lambda number, point, report: one(config, base, number, point, report))
    settings = [setting_of(base, set_only(row["point"])) for row in rows]
    content = finish(config, table, rows, rows[0], settings)
    best = max((row for row in rows if not row["error"]), key=lambda row: row[FIGURE])
    path, command = write_engine(config, {**base, **set_only(best["point"])})
    say(f"where models generate: {path}\n  {command}")
    return {**content, "engine_experiment": str(path), "engine_command": command}


def write_engine(config: DictConfig, engine: Mapping[str, Any]) -> tuple[Path, str]:
    """Write an experiment file that gives what was found to GRPO's server, and to sampling and evaluation with engine=vllm. Return its path
    and a command with it."""
    groups = config.tuned.experiment.groups
    path = Path(config.run_dir) / "conf/experiment" / f"tuned_engine_{groups.model}_{groups.hardware}.yaml".replace("/", "_")
    start = [*start_of(path), f"hardware={groups.hardware}", f"model={groups.model}"]
    command = shlex.join([*start, "method=grpo", "topology=split"])
    given = {name: value for name, value in engine.items() if value is not None and name not in (*vllm_arguments.OURS, *OF_A_RUN)}
    args = {name: value for name, value in given.items() if not name.isupper()}
    share = {"server_memory_share": args.pop(SHARE)} if SHARE in args else {}
    content = {"topology": {**share, "server_args": args}, "user_env": vllm_arguments.env_of(given)}
    header = [
        "# @package _global_",
        f"# What method=tune/vllm found, for GRPO's server, and for sampling and evaluation with engine=vllm: {groups.model}.",
        *(["# From a smoke run: its figures say nothing about this GPU."] if config.smoke else []),
        f"# Needs:     {config.hardware.product}, and a vLLM of the version that was tuned.",
        f"# Launch:    {command}",
        f"# Override:  {shlex.join([*start, 'method=evaluate', 'method.args.engine=vllm'])}",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(header) + "\n" + yaml.safe_dump(content, sort_keys=False))
    return path, command


def setting_of(base: Any, point: Point) -> Setting:
    return Setting({"base": {**base, **point}} if point else {})


def one(config: DictConfig, base: Any, number: int, point: Point, report: Report) -> Row:
    """Raises UserError where no engine starts, and Pruned."""
    reported, pruned = 0, False

    def on_rows(rows: list[Row]) -> bool:
        nonlocal reported, pruned
        try:
            for row in rows[reported:]:
                if row["error"]:
                    return True
                report(row[FIGURE])
        except Pruned:
            pruned = True
        reported = len(rows)
        return pruned

    outcome = trial.run(config, f"trial{number}", setting_of(base, point), on_rows=on_rows)
    error = outcome.error or next((row["error"] for row in outcome.rows if row["error"]), None)
    if error:
        raise UserError(error)
    if pruned:
        raise Pruned
    figures = {f"{row['kind']} {row['input']}+{row['output']}": row[FIGURE] for row in outcome.rows}
    if not figures:
        raise UserError("it measured nothing")
    return {FIGURE: statistics.geometric_mean(figures.values()), f"{FIGURE}_by_length": figures}


if __name__ == "__main__":
    main(vllm)
