"""Select the model that is best on held-out rows (method.selection).

transformers evaluates at every save and records the best step (`metric_for_best_model`). This
module adds the held-out rows, and early stopping that also works in resumed runs. It loads the best
checkpoint by its step, because transformers records a path in the staging directory.
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
    """Return the metric that selects the model, or None to use the last model."""
    metric: str | None = OmegaConf.select(config, "method.selection.metric")
    return metric


def heldout(config: DictConfig) -> Dataset | None:
    """Return held-out rows for the trainer, or None if no metric is set. Raises UserError."""
    return load_heldout_table(config.data, config.method.rows) if metric_of(config) else None


class Patience(EarlyStoppingCallback):
    """Stop early like transformers, but restore the counter from the checkpoint."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.early_stopping_patience_counter = _misses(state)


def patience(config: DictConfig) -> list[Patience]:
    """Return [callback for early stopping], or [] if patience is not set."""
    if not metric_of(config) or config.method.selection.patience is None:
        return []
    return [Patience(config.method.selection.patience, config.method.selection.min_delta)]


def stopped_early(config: DictConfig, state: TrainerState) -> bool:
    """Return whether the run stopped early when `state` was saved."""
    return bool(patience(config)) and _misses(state) >= config.method.selection.patience


def _misses(state: TrainerState) -> int:
    """Return the number of evaluations without improvement when `state` was saved."""
    saved = state.stateful_callbacks.get(Patience.__name__)
    return int(saved["attributes"]["early_stopping_patience_counter"]) if saved else 0


def load_best(config: DictConfig, trainer: Trainer) -> dict[str, Any]:
    """Load the best checkpoint's weights into `trainer`, and return entries for result.json.

    Return {} if no metric is set. Raises UserError if all values are NaN.
    """
    metric, state = metric_of(config), trainer.state
    if metric is None:
        return {}
    if not state.best_global_step:
        raise UserError(
            f"method.selection.metric={metric}: the value was NaN at every save. Use a lower "
            "method.args.learning_rate, or a smaller method.args.save_steps."
        )
    early = state.global_step < state.max_steps
    if state.best_global_step != state.global_step:
        best = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        trainer.load_weights(best)
    say(
        f"using the best model, from step {state.best_global_step} of {state.global_step}, with "
        f"{metric} {state.best_metric:.4g}"
    )
    if early:
        evaluations = config.method.selection.patience
        say(f"stopped early after {evaluations} evaluations without improvement")
    return {
        "best_step": state.best_global_step,
        f"best_{metric}": state.best_metric,
        "stopped_early": early,
    }
