"""Run a trainer: resume, stop on signals, profile, and save the model."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from peft import PeftModel
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from launch.core.errors import UserError
from recipes.measure import profiling, telemetry
from recipes.measure.metrics import Metrics
from recipes.models import adapters, vision
from recipes.models.model_build import whole_model
from recipes.rank import ranks
from recipes.rank.device import DTYPES, compute_dtype
from recipes.rank.files import move_directory, staging, weights_sha256
from recipes.rank.program import Interrupted, ServerLost, is_main_rank, say, stop_requested
from recipes.rank.rejections import rejections
from recipes.training import checkpoint, selection

TEXT = ".text"  # the part without the vision tower, until both are in one directory

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def build_arguments(arguments_class: type[Arguments], config: DictConfig) -> Arguments:
    """Return the trainer's arguments from `config.trainer_args`. Raises UserError."""
    if config.hardware.vendor == "none" or sends_over_gloo(config):
        from recipes.smoke import gloo_trainer

        gloo_trainer.use(config)
    # With these variables, a single rank would use DDP and NCCL.
    if config.topology.strategy == "none":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    if OmegaConf.select(config, "step.compile"):
        # This import takes 0.2 s.
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()  # start compiler processes while rows and model are loaded
    with rejections("method.args", arguments_class.__name__):
        args = arguments_class(**OmegaConf.to_container(config.trainer_args))
    # Otherwise, the copy of each batch would wait for the previous step.
    args.accelerator_config.non_blocking = args.dataloader_pin_memory
    if config.topology.strategy == "fsdp":
        args.fsdp_plugin_args |= _fsdp_policies(config)
    return args


def _fsdp_policies(config: DictConfig) -> dict[str, Any]:
    """Return arguments of accelerate's FSDP plugin that TrainingArguments cannot set.

    By default, accelerate reduces gradients in the compute dtype and pins offloaded memory.
    """
    policies: dict[str, Any] = {}
    compute, reduce = compute_dtype(config), DTYPES[config.topology.fsdp.reduce_dtype]
    if (compute, reduce) != (torch.float32, torch.float32):
        policies["mixed_precision_policy"] = {
            "param_dtype": compute,
            "reduce_dtype": reduce,
            "output_dtype": compute,
        }
    # Memory cannot be pinned without a GPU.
    if config.topology.fsdp.cpu_offload:
        pins = config.hardware.dataloader.pin_memory and config.hardware.vendor != "none"
        policies["cpu_offload"] = CPUOffloadPolicy(pin_memory=pins)
    return policies


def sends_over_gloo(config: DictConfig) -> bool:
    """Return whether server and trainer share one GPU, which NCCL and RCCL do not support.

    `backend` of launch/machine/placement.py has the same condition.
    """
    return (
        config.topology.servers > 0
        and (config.topology.num_gpus or config.hardware.gpus_per_node) == 1
    )


def train(config: DictConfig, trainer: Trainer, metrics: Metrics, cycle: int = 1) -> dict[str, Any]:
    """Train from the newest complete checkpoint or from the start; return result.json's content.

    Checkpoints are possible only after multiples of `cycle` steps. After a signal, save a
    checkpoint and raise Interrupted. Raises UserError if no step was possible.
    """
    output_dir = Path(trainer.args.output_dir)
    heartbeat = Path(config.run_dir) / checkpoint.HEARTBEAT
    # Trials of a tuning run do not need checkpoints.
    stop = StopOnSignal(cycle, saves="trial" not in config)
    trainer.remove_callback(PrinterCallback)
    for callback in (stop, metrics, Heartbeat(heartbeat), Freeze(), *selection.patience(config)):
        trainer.add_callback(callback)
    if is_main_rank():
        checkpoint.clear_staging(output_dir)
    _check_strategy(config, trainer)
    adapters.check_mergeable(trainer.model)
    trainer.compile_layers(config)
    metrics.telemetry = telemetry.for_this_rank(config.hardware)
    profile = profiling.create_profile(config)
    trainer.add_callback(ProfiledSteps(profile, cycle))
    with profile, metrics.telemetry.running():
        # Only the main rank reads and hashes the checkpoints.
        newest = checkpoint.newest(output_dir, heartbeat) if is_main_rank() else None
        try:
            _run_steps(config, trainer, metrics, ranks.broadcast(newest))
        except ServerLost:
            if "trial" not in config and trainer.state.global_step % cycle == 0:
                _save_last_step(trainer, output_dir)
            raise
    steps = trainer.state.global_step
    result = {"steps": steps, **metrics.summary()}
    result |= telemetry.energy(metrics.telemetry.energy_j, metrics.num_tokens())
    if trainer.compiled is not None:
        result["compiled"] = trainer.compiled
    if stop.stopped and steps < trainer.state.max_steps:
        say(f"interrupted after step {steps}. To resume from {output_dir}, repeat the command")
        raise Interrupted(**result)
    if steps == 0:  # transformers does not report this
        raise UserError(
            f"no step was possible, because the data has only {len(trainer.train_dataset)} rows, "
            "less than a batch. Use a smaller method.args.per_device_train_batch_size or more data."
        )
    if "trial" not in config:
        result |= selection.load_best(config, trainer)
    # Tuning runs and measurements do not need the model.
    if "trial" in config or not config.get("save_model", True):
        say(f"done: {steps} steps. The model is not saved")
        return result
    model_dir = Path(config.run_dir) / "model"
    with staging(_staged(model_dir)):
        result |= save_model(config, trainer, model_dir)
    if not is_main_rank():
        return {}
    result |= {"model": str(model_dir), "weights_sha256": weights_sha256(model_dir, heartbeat)}
    say(f"done: {steps} steps, loss {result.get('loss')}, model in {model_dir}")
    return result


class ProfiledSteps(TrainerCallback):
    """Report a trainer's steps to a profile."""

    def __init__(self, profile: profiling.Profile, cycle: int) -> None:
        self.profile, self.cycle = profile, cycle

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.profile.begin(state.max_steps - state.global_step, self.cycle, model)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.profile.step()


def save_model(config: DictConfig, trainer: Trainer, target: Path) -> dict[str, float]:
    """Save the model and its tokenizer, with the vision tower of its source.

    With an adapter, save the adapter and the merged model.

    Return {merge_error} of adapters.merge, or {} if there is no adapter. All ranks must call this,
    since weights may be sharded. Only the main rank writes.
    """
    plugin = trainer.accelerator.state.deepspeed_plugin
    sharded = trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if not is_main_rank():
        return {}
    staged = _staged(target)
    shutil.rmtree(staged, ignore_errors=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    figures = {}
    if isinstance(model, PeftModel):
        # Do not save TRL's copy of the adapter, which is the reference.
        model.save_pretrained(staged, state_dict=state, selected_adapters=["default"])
        trainer.processing_class.save_pretrained(staged)
        shutil.copy(target.with_name(adapters.BASE), staged)
        move_directory(staged, target.with_name("adapter"))
        (model, error), state = adapters.merge(model, state), None
        figures = {"merge_error": error}
    if whole := whole_model(config, model.config):
        model.save_pretrained(staged / TEXT, state_dict=state)
        vision.restore(staged / TEXT, whole, staged)
        shutil.rmtree(staged / TEXT)
    else:
        model.save_pretrained(staged, state_dict=state)
    trainer.processing_class.save_pretrained(staged)
    move_directory(staged, target)
    return figures


def _staged(target: Path) -> Path:
    return target.with_name(f".{target.name}.staging")


def _check_strategy(config: DictConfig, trainer: Trainer) -> None:
    """Raise RuntimeError if accelerate uses another strategy than the configured one."""
    strategy, accelerator = config.topology.strategy, trainer.accelerator
    names = {"FSDP": "fsdp", "DEEPSPEED": "zero", "NO": "none"}
    actual = names.get(accelerator.distributed_type.name, "ddp")
    if actual == "zero":
        actual += str(accelerator.state.deepspeed_plugin.zero_stage)
    world_size = ranks.num_ranks()
    if accelerator.num_processes != world_size or (world_size > 1 and actual != strategy):
        raise RuntimeError(
            f"topology.strategy={strategy} with {world_size} rank(s): accelerate uses {actual} "
            f"with {accelerator.num_processes}"
        )


def _run_steps(
    config: DictConfig, trainer: Trainer, metrics: Metrics, resumed: Path | None
) -> None:
    """Train from `resumed` or from the start. Only load a checkpoint of the last step."""
    if resumed is None:
        trainer.train()
        return
    say(f"resuming from {resumed}")
    state = TrainerState.load_from_json(str(resumed / TRAINER_STATE_NAME))
    complete = checkpoint.step_of(resumed) == trainer.args.max_steps
    if not complete and not selection.stopped_early(config, state):
        trainer.args.eval_on_start = False
        trainer.train(resume_from_checkpoint=str(resumed))
        return
    # train() would take one more step, so only restore the state.
    trainer.state = state
    metrics.begin(state)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        # This shards the model and loads the checkpoint.
        batches = trainer.get_train_dataloader()
        trainer._prepare_for_training(state.max_steps, batches, str(resumed))
    else:
        trainer._load_from_checkpoint(str(resumed))


def _save_last_step(trainer: Trainer, output_dir: Path) -> None:
    """Save the weights after the last complete step, unless a checkpoint has them."""
    step = trainer.state.global_step
    saved = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if ranks.broadcast(step > 0 and not saved.exists()):
        trainer._save_checkpoint(trainer.model, trial=None)
        say(f"saved step {step} in {saved}")


class StopOnSignal(TrainerCallback):
    """After SIGTERM or SIGINT, save and stop at the next multiple of `cycle` steps."""

    def __init__(self, cycle: int, saves: bool = True) -> None:
        self.cycle, self.saves = cycle, saves
        self.stopped = False
        self.any_rank = AnyRankFlag()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.any_rank(stop_requested(), args.device) and state.global_step % self.cycle == 0:
            control.should_training_stop = self.stopped = True
            control.should_save = control.should_save or self.saves


class Heartbeat(TrainerCallback):
    """Touch a file whenever the main rank makes progress, for the launcher's watchdog."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _beat(self, *args: Any, **kwargs: Any) -> None:
        if is_main_rank():
            self.path.touch()

    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_save = _beat


class Freeze(TrainerCallback):
    """After the first step, exclude model and compiled code from garbage collection.

    The imports are excluded before data is read. These are 160,000 more objects, which a full
    collection takes 0.1 s to visit. Reading the log-probabilities of 96 x 512 tokens from a server
    starts 15 full collections in 10 steps (2026-11-29, on a CPU).
    """

    frozen = False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.frozen:
            gc.collect()
            gc.freeze()
            self.frozen = True


class AnyRankFlag:
    """Determine whether a flag is set on any rank, so that all ranks stop after the same step.

    On GPUs, return the previous call's result, because the current one is not ready until the GPU
    has finished the step.
    """

    def __init__(self) -> None:
        self.previous: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, flag: bool, device: torch.device) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        flags = torch.full((), float(flag), device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if device.type != "cuda":
            return bool(flags.item())
        previous, on_host = self.previous, torch.empty((), pin_memory=True)
        on_host.copy_(flags, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.previous = on_host, copied
        if previous is None:
            return False
        previous[1].synchronize()
        return bool(previous[0])
