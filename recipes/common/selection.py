"""The best model by held-out rows, in place of the last one: method.selection of sft, dpo and grpo.

transformers measures (`metric_for_best_model`, at every save) and counts; what is ours: rows, a count of patience that a resumed run goes
on with, and loading the best checkpoint by its step, since a checkpoint is written elsewhere before it has its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from recipes.common.data import load_heldout_table
from recipes.common.errors import UserError
from recipes.common.program import say


def metric_of(config: DictConfig) -> str | None:
    """The figure that chooses; None where the last model is kept."""
    metric: str | None = OmegaConf.select(config, "method.selection.metric")
    return metric


def heldout(config: DictConfig) -> Dataset | None:
    """The rows that it is measured on, in the format of the method's trainer. Raises UserError where there are none."""
    return load_heldout_table(config.data, config.method.name) if metric_of(config) else None


class Patience(EarlyStoppingCallback):
    """transformers' own, which counts on where a checkpoint's state left off."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.early_stopping_patience_counter = _misses(state)


def patience(config: DictConfig) -> list[Patience]:
    """The callback that stops early, where one is asked for."""
    if not metric_of(config) or config.method.selection.patience is None:
        return []
    return [Patience(config.method.selection.patience, config.method.selection.min_delta)]


def stopped_early(config: DictConfig, state: TrainerState) -> bool:
    """Whether patience had run out when `state` was saved."""
    return bool(patience(config)) and _misses(state) >= config.method.selection.patience


def _misses(state: TrainerState) -> int:
    """Measurements in a row that were no better, as of the last save."""
    saved = state.stateful_callbacks.get(Patience.__name__)
    return int(saved["attributes"]["early_stopping_patience_counter"]) if saved else 0


def load_best(config: DictConfig, trainer: Trainer) -> dict[str, Any]:
    """Give `trainer` the model of the best checkpoint; returns what result.json says of the choice, nothing where none is asked for.

    Raises UserError where no measurement was a number.
    """
    metric, state = metric_of(config), trainer.state
    if metric is None:
        return {}
    if not state.best_global_step:
        raise UserError(
            f"method.selection.metric={metric}: it was no number at any save, so no model was the best. "
            "Lower method.args.learning_rate, or save more often by method.args.save_steps."
        )
    early = state.global_step < state.max_steps
    if state.best_global_step != state.global_step:
        best = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        trainer.load_weights(best)
    why = f", stopped early: {config.method.selection.patience} measurements in a row were no better" if early else ""
    say(f"the best model is that of step {state.best_global_step} of {state.global_step}: {metric} {state.best_metric:.4g}{why}")
    return {"best_step": state.best_global_step, f"best_{metric}": state.best_metric, "stopped_early": early}
