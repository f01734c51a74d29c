"""What the trainers' recipes share around `trainer.train()`: resume, stop on a signal, profile, save the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from peft import PeftModel
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.common import checkpoint
from recipes.common.errors import UserError
from recipes.common.files import move_directory, weights_sha256
from recipes.common.metrics import Metrics
from recipes.common.program import Interrupted, is_main_rank, say, stop_asked

Arguments = TypeVar("Arguments", bound=TrainingArguments)
PROFILED_STEPS = 3


def build_arguments(arguments_class: type[Arguments], config: DictConfig) -> Arguments:
    """The trainer's own configuration from `config.trainer_args`. Raises UserError with its words where it refuses them."""
    try:
        return arguments_class(**OmegaConf.to_container(config.trainer_args))
    except (TypeError, ValueError) as error:
        raise UserError(f"method.args: {arguments_class.__name__} refuses them: {error}") from error


def train(config: DictConfig, trainer: Trainer, metrics: Metrics, cycle: int = 1) -> dict[str, Any]:
    """Train from the newest whole checkpoint, or from the start, to the end; returns the content of result.json.

    Steps after which a checkpoint may be taken are multiples of `cycle`. Raises Interrupted after a checkpoint when a signal came.
    """
    output_dir = Path(trainer.args.output_dir)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StopOnSignal(cycle))
    trainer.add_callback(metrics)
    if config.profile == "torch":
        trainer.add_callback(TorchProfile(Path(config.run_dir) / "profile"))
    if is_main_rank():
        checkpoint.clear_staging(output_dir)
    resumed = checkpoint.newest(output_dir)
    _run_steps(trainer, metrics, resumed)
    if stop_asked() and trainer.state.global_step < trainer.state.max_steps:
        say(f"interrupted after step {trainer.state.global_step}; the same command continues from {output_dir}")
        raise Interrupted(steps=trainer.state.global_step, **metrics.summary())
    if trainer.state.global_step == 0:  # the trainer ends without a word when no whole batch can be filled
        raise UserError(
            f"no step was taken: the data has {len(trainer.train_dataset)} rows, fewer than one batch. "
            "Lower method.args.per_device_train_batch_size, or give more data."
        )
    model_dir = Path(config.run_dir) / "model"
    save_model(trainer, model_dir)
    result = {"steps": trainer.state.global_step, **metrics.summary(), "model": str(model_dir), "weights_sha256": weights_sha256(model_dir)}
    say(f"done: {result['steps']} steps, loss {result.get('loss')}, model in {model_dir}")
    return result


def save_model(trainer: Trainer, target: Path) -> None:
    """The trained model with its tokenizer as `target`; an adapter is merged into it, and kept beside it as `adapter`."""
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    adapter = isinstance(trainer.model, PeftModel)
    trainer.save_model(str(staged))
    if not is_main_rank():
        return
    if adapter:
        move_directory(staged, target.with_name("adapter"))
        trainer.model.merge_and_unload().save_pretrained(staged)
        trainer.processing_class.save_pretrained(staged)
    move_directory(staged, target)


def _run_steps(trainer: Trainer, metrics: Metrics, resumed: Path | None) -> None:
    if resumed is None:
        trainer.train()
        return
    say(f"resuming from {resumed}")
    if checkpoint.step_of(resumed) == trainer.args.max_steps:  # nothing is left to do, and train() would do one step more
        trainer._load_from_checkpoint(str(resumed))
        trainer.state = TrainerState.load_from_json(str(resumed / "trainer_state.json"))
        metrics.begin(trainer.state)
    else:
        trainer.train(resume_from_checkpoint=str(resumed))


class StopOnSignal(TrainerCallback):
    """Saves and stops after the step in which SIGTERM or SIGINT came, or a few later where `cycle` asks for it."""

    def __init__(self, cycle: int) -> None:
        self.cycle = cycle

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        aligned = state.global_step % self.cycle == 0
        if aligned and _any_rank(stop_asked(), args.device):
            control.should_save = control.should_training_stop = True


class TorchProfile(TrainerCallback):
    """A trace of a few steps as `trace.json` (chrome://tracing, Perfetto) and its sums by operator as `operators.txt`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The first step allocates and compiles; the second one starts the profiler's own machinery.
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=PROFILED_STEPS, repeat=1)
        self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
        self.profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.profiler.step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if is_main_rank():
            self.directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self.directory / "trace.json"))
            by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            (self.directory / "operators.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=40))


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank: a signal reaches ranks in different steps, and all must stop after the same one."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
