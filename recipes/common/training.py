"""What the trainers' recipes share around `trainer.train()`: resume, stop on a signal, profile, save the model."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
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

from recipes.common import adapters, checkpoint, profiling, selection, telemetry
from recipes.common.device import DTYPES, compute_dtype
from recipes.common.errors import UserError
from recipes.common.files import move_directory, weights_sha256
from recipes.common.metrics import Metrics
from recipes.common.program import Interrupted, is_main_rank, say, stop_asked

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def build_arguments(arguments_class: type[Arguments], config: DictConfig) -> Arguments:
    """The trainer's own configuration from `config.trainer_args`. Raises UserError with its words where it refuses them."""
    if config.hardware.vendor == "none":
        from recipes.smoke import gloo_trainer

        gloo_trainer.use(config)
    elif sends_over_gloo(config):
        from recipes.smoke import gloo_trainer

        gloo_trainer.use_server()
    if config.topology.strategy == "none":  # of one rank torchrun makes a group too: DDP around the model, and NCCL for every figure
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    if OmegaConf.select(config, "step.compile"):
        from torch._inductor.async_compile import AsyncCompile  # 0.2 s, which other runs need not spend

        AsyncCompile.warm_pool()  # its processes start while rows and model are made
    try:
        args = arguments_class(**OmegaConf.to_container(config.trainer_args))
    except (TypeError, ValueError) as error:
        raise UserError(f"method.args: {arguments_class.__name__} refuses them: {error}") from error
    args.accelerator_config.non_blocking = args.dataloader_pin_memory  # else each batch waits for the step before it
    if config.topology.strategy == "fsdp":
        args.fsdp_plugin_args |= _fsdp_policies(config)
    return args


def _fsdp_policies(config: DictConfig) -> dict[str, Any]:
    """What no argument reaches: accelerate would reduce in the dtype of the matrix products, and pin what it offloads."""
    found: dict[str, Any] = {}
    compute, reduce = compute_dtype(config), DTYPES[config.topology.fsdp.reduce_dtype]
    if (compute, reduce) != (torch.float32, torch.float32):
        found["mixed_precision_policy"] = {"param_dtype": compute, "reduce_dtype": reduce, "output_dtype": compute}
    if config.topology.fsdp.cpu_offload:  # without a GPU nothing can be pinned, and there is nothing to copy to
        pins = config.hardware.dataloader.pin_memory and config.hardware.vendor != "none"
        found["cpu_offload"] = CPUOffloadPolicy(pin_memory=pins)
    return found


def sends_over_gloo(config: DictConfig) -> bool:
    """Of GPUs: whether server and trainer share one, as launch/supervision/serving.py has it. NCCL and RCCL refuse two ranks on it."""
    return config.topology.servers > 0 and (config.topology.num_gpus or config.hardware.gpus_per_node) == 1


def train(config: DictConfig, trainer: Trainer, metrics: Metrics, cycle: int = 1) -> dict[str, Any]:
    """Train from the newest whole checkpoint, or from the start, to the end; returns the content of result.json.

    Steps after which a checkpoint may be taken are multiples of `cycle`. Raises Interrupted after a checkpoint when a signal came.
    """
    output_dir = Path(trainer.args.output_dir)
    heartbeat = Path(config.run_dir) / checkpoint.HEARTBEAT
    stop = StopOnSignal(cycle, saves="trial" not in config)  # a trial's time would go into a checkpoint that nobody wants
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(stop)
    trainer.add_callback(metrics)
    trainer.add_callback(Heartbeat(heartbeat))
    for callback in selection.patience(config):
        trainer.add_callback(callback)
    if is_main_rank():
        checkpoint.clear_staging(output_dir)
    _check_strategy(config, trainer)
    trainer.compile_layers(config)
    metrics.telemetry = telemetry.of_this_rank(config.hardware.vendor)
    with _profiled(config, trainer, cycle), metrics.telemetry.running():
        _run_steps(config, trainer, metrics, _newest_for_all(output_dir, heartbeat))
    figures = telemetry.energy(metrics.telemetry.energy_j, metrics.num_tokens())
    figures |= {} if trainer.compiled is None else {"compiled": trainer.compiled}
    if stop.stopped and trainer.state.global_step < trainer.state.max_steps:
        say(f"interrupted after step {trainer.state.global_step}; the same command continues from {output_dir}")
        raise Interrupted(steps=trainer.state.global_step, **metrics.summary(), **figures)
    if trainer.state.global_step == 0:  # the trainer ends without a word when no whole batch can be filled
        raise UserError(
            f"no step was taken: the data has {len(trainer.train_dataset)} rows, fewer than one batch. "
            "Lower method.args.per_device_train_batch_size, or give more data."
        )
    chosen = {} if "trial" in config else selection.load_best(config, trainer)
    if "trial" in config or not config.get("save_model", True):  # of a tuning, or a measurement: its speed is all that is wanted
        say(f"done: {trainer.state.global_step} steps; the model is not saved")
        return {"steps": trainer.state.global_step, **metrics.summary(), **figures, **chosen}
    model_dir = Path(config.run_dir) / "model"
    saved = save_model(trainer, model_dir)
    if not is_main_rank():
        return {}
    hashed = weights_sha256(model_dir, heartbeat)
    result = {"steps": trainer.state.global_step, **metrics.summary(), **figures, **chosen, **saved}
    result |= {"model": str(model_dir), "weights_sha256": hashed}
    say(f"done: {result['steps']} steps, loss {result.get('loss')}, model in {model_dir}")
    return result


@contextlib.contextmanager
def _profiled(config: DictConfig, trainer: Trainer, cycle: int) -> Iterator[None]:
    profile = profiling.of(config)
    trainer.add_callback(ProfiledSteps(profile, cycle))
    try:
        yield
    finally:
        profile.end()


class ProfiledSteps(TrainerCallback):
    """Tells a profile of a trainer's steps."""

    def __init__(self, profile: profiling.Profile, cycle: int) -> None:
        self.profile, self.cycle = profile, cycle

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.profile.begin(state.max_steps - state.global_step, self.cycle, model)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.profile.step()


def save_model(trainer: Trainer, target: Path) -> dict[str, float]:
    """The trained model with its tokenizer as `target`; an adapter is merged into it, and kept beside it as `adapter`.

    Returns what result.json says of it: `merge_error` of an adapter (adapters.merge). Every rank takes part, since its part of the
    weights is gathered; the main one writes.
    """
    plugin = trainer.accelerator.state.deepspeed_plugin
    sharded = trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if not is_main_rank():
        return {}
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    lost = None
    if isinstance(model, PeftModel):
        model.save_pretrained(staged, state_dict=state, selected_adapters=["default"])  # not the copy that TRL refers to
        trainer.processing_class.save_pretrained(staged)
        shutil.copy(target.with_name(adapters.BASE), staged)
        move_directory(staged, target.with_name("adapter"))
        model, lost = adapters.merge(model, state)
        say(f"merged in {str(model.dtype).removeprefix('torch.')}: rounding is {lost:.1%} of what the adapter changes")
        state = None
    model.save_pretrained(staged, state_dict=state)
    trainer.processing_class.save_pretrained(staged)
    move_directory(staged, target)
    return {} if lost is None else {"merge_error": lost}


def _newest_for_all(output_dir: Path, heartbeat: Path) -> Path | None:
    """The checkpoint to resume from: one rank reads and hashes it, and tells the others."""
    found: list[Path | None] = [checkpoint.newest(output_dir, heartbeat) if is_main_rank() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _check_strategy(config: DictConfig, trainer: Trainer) -> None:
    """Whether the model was trained as asked. Raises RuntimeError: accelerate falls back to another strategy without a word."""
    wanted = config.topology.strategy
    accelerator = trainer.accelerator
    found = {"FSDP": "fsdp", "DEEPSPEED": "zero", "NO": "none"}.get(accelerator.distributed_type.name, "ddp")
    if found == "zero":
        found += str(accelerator.state.deepspeed_plugin.zero_stage)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != ranks or (ranks > 1 and found != wanted):
        raise RuntimeError(f"topology.strategy={wanted} on {ranks} rank(s) ran as {found} on {accelerator.num_processes}")


def _run_steps(config: DictConfig, trainer: Trainer, metrics: Metrics, resumed: Path | None) -> None:
    """Train to the end; a checkpoint that ended its run is loaded only."""
    if resumed is None:
        trainer.train()
        return
    say(f"resuming from {resumed}")
    state = TrainerState.load_from_json(str(resumed / TRAINER_STATE_NAME))
    # Nothing is left to do, and train() would do one step more.
    if checkpoint.step_of(resumed) == trainer.args.max_steps or selection.stopped_early(config, state):
        trainer.state = state
        metrics.begin(state)
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # only a model that is spread can be loaded, and gathered
            trainer._prepare_for_training(state.max_steps, trainer.get_train_dataloader(), str(resumed))
        else:
            trainer._load_from_checkpoint(str(resumed))
        return
    trainer.train(resume_from_checkpoint=str(resumed))


class StopOnSignal(TrainerCallback):
    """Saves, unless told otherwise, and stops after the step in which SIGTERM or SIGINT came, or a few later where `cycle` asks for it."""

    def __init__(self, cycle: int, saves: bool = True) -> None:
        self.cycle, self.saves = cycle, saves
        self.stopped = False
        self.asked = AnyRank()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.asked(stop_asked(), args.device) and state.global_step % self.cycle == 0:
            control.should_training_stop = self.stopped = True
            control.should_save = control.should_save or self.saves


class Heartbeat(TrainerCallback):
    """A file whose time says when the main rank last got on: the launcher's watchdog looks at it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._beat()

    def _beat(self) -> None:
        if is_main_rank():
            self.path.touch()


class AnyRank:
    """Whether a flag is set on any rank: a signal reaches ranks in different steps, and all must stop after the same one.

    On GPUs the answer is that of the call before: this one's is still on its way, and to wait for it would be to wait for the step.
    """

    def __init__(self) -> None:
        self.before: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, flag: bool, device: torch.device) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        flags = torch.full((), float(flag), device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if device.type != "cuda":
            return bool(flags.item())
        before, found = self.before, torch.empty((), pin_memory=True)
        found.copy_(flags, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.before = found, copied
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])
