"""Arguments of vLLM's engine that give the most tokens a second: an Optuna search over method=bench/vllm.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=tune/vllm model=qwen3_8b
    No hub:  python launch/run.py hardware=mi350x topology=single method=tune/vllm model=qwen3_8b model.init=random

A trial starts vLLM's own benchmark with one set of arguments, and reports after each pair of lengths, the shortest first: one that is
behind is given up there. Its figure is the geometric mean of output tokens a second over the lengths.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench import vllm_arguments
from recipes.bench.series import Column, Row, Table
from recipes.common.errors import UserError
from recipes.common.program import is_main_rank, main
from recipes.tune import trial
from recipes.tune.search import Point, Pruned, Report, SearchConfig, search, set_only
from recipes.tune.trial import Setting
from recipes.tune.tuning import finish

FIGURE = "output_tokens_per_second"


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
    return finish(config, table, rows, rows[0], settings)


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
