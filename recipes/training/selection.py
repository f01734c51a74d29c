"""Keep the best model by held-out rows instead of the last one: method.selection.

transformers measures (`metric_for_best_model`, at every save) and counts. This adds the rows and a
count of patience that survives a resume. It also loads the best checkpoint by its step, since
transformers records only its path in the staging directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from launch.core.errors import UserError
from recipes.data.data_load import load_heldout_table
from recipes.rank.program import say


def metric_of(config: DictConfig) -> str | None:
    """Return the metric that selects the model, or None to keep the last model."""
    metric: str | None = OmegaConf.select(config, "method.selection.metric")
    return metric


def heldout(config: DictConfig) -> Dataset | None:
    """Return held-out rows in the trainer's format, or None without a metric. Raises UserError."""
    return load_heldout_table(config.data, config.method.rows) if metric_of(config) else None


class Patience(EarlyStoppingCallback):
    """Stop early as transformers does, but resume the count stored in a checkpoint."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.early_stopping_patience_counter = _misses(state)


def patience(config: DictConfig) -> list[Patience]:
    """Return a list with the callback that stops early, or [] if it is not configured."""
    if not metric_of(config) or config.method.selection.patience is None:
        return []
    return [Patience(config.method.selection.patience, config.method.selection.min_delta)]


def stopped_early(config: DictConfig, state: TrainerState) -> bool:
    """Return whether patience had run out when `state` was saved."""
    return bool(patience(config)) and _misses(state) >= config.method.selection.patience


def _misses(state: TrainerState) -> int:
    """Return the number of consecutive measurements without improvement, as of the last save."""
    saved = state.stateful_callbacks.get(Patience.__name__)
    return int(saved["attributes"]["early_stopping_patience_counter"]) if saved else 0


def load_best(config: DictConfig, trainer: Trainer) -> dict[str, Any]:
    """Load the best checkpoint's model into `trainer`, and return the keys of result.json for it.

    Return {} without a metric. Raises UserError if no measurement was a number.
    """
    metric, state = metric_of(config), trainer.state
    if metric is None:
        return {}
    if not state.best_global_step:
        raise UserError(
            f"method.selection.metric={metric}: NaN at every save, so there is no best model. "
            "Lower method.args.learning_rate, or save more often by method.args.save_steps."
        )
    early = state.global_step < state.max_steps
    if state.best_global_step != state.global_step:
        best = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        trainer.load_weights(best)
    say(
        f"the best model is that of step {state.best_global_step} of {state.global_step}: "
        f"{metric} {state.best_metric:.4g}"
    )
    if early:
        say(f"stopped early: no improvement in {config.method.selection.patience} measurements")
    return {
        "best_step": state.best_global_step,
        f"best_{metric}": state.best_metric,
        "stopped_early": early,
    }
