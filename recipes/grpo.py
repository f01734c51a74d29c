"""Train with GRPO: among a prompt's completions, make those with above-average rewards likelier.

The launcher starts this program, one process per GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=grpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=grpo model=qwen3_4b    (1 GPU generates)

The defaults are TRL's, which differ from the paper (DeepSeekMath, arXiv:2402.03300) in two points.
There is no KL term (beta=0) and therefore no reference model. The loss is averaged over all tokens
of the batch (`dapo`, arXiv:2503.14476) instead of within each completion.

Checkpoints do not contain TRL's state within a generation cycle, so they are saved between cycles.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from omegaconf import DictConfig
from trl import GRPOConfig, GRPOTrainer

from launch.core.errors import UserError
from recipes.data.data_curriculum import Curriculum
from recipes.data.data_load import Loaded, columns, texts
from recipes.data.data_prepare import load_once, prepare_prompts
from recipes.measure.metrics import Metrics
from recipes.models.layers import CompiledLayers
from recipes.models.model_build import (
    adapter_config,
    build_model,
    build_tokenizer,
    find_source,
    write_random,
)
from recipes.rank.program import main
from recipes.rewards.verifier import build_verifier, check_rows
from recipes.sampling import serving
from recipes.sampling.generation import beat_by_token
from recipes.sampling.overlap import OverlappedGeneration
from recipes.sampling.sampling_ratio import SamplingRatio
from recipes.sampling.stream import StreamedGeneration
from recipes.training.checkpoint import HEARTBEAT, AtomicCheckpoints
from recipes.training.communication import LeanCommunication
from recipes.training.grpo_step import PackedCompletions
from recipes.training.selection import heldout
from recipes.training.step_shares import TimedStep
from recipes.training.train_loop import build_arguments, train
from recipes.training.trainer_errors import ReportedRejections


class Trainer(
    TimedStep,
    CompiledLayers,
    LeanCommunication,
    SamplingRatio,
    PackedCompletions,
    Curriculum,
    AtomicCheckpoints,
    ReportedRejections,
    GRPOTrainer,
):
    """TRL's trainer with packed completions, curriculum, timed steps and atomic checkpoints."""

    ahead = 0  # number of generations whose rows are read before their turn
    _sampler: Iterable[int] = ()  # streamed rows have none

    def _get_train_sampler(self, dataset: Any = None) -> Iterable[int]:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Draw the orders of earlier epochs again, so that a resumed run continues the order.

        The order of TRL's sampler depends on how often it was drawn, not on the epoch.
        """
        epochs, steps = super()._init_training_state(*args, **kwargs)
        for _ in range(epochs):
            next(iter(self._sampler), None)
        return epochs, steps

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        heartbeat = Path(self.args.output_dir).with_name(HEARTBEAT)
        with beat_by_token(self.model, heartbeat), serving.shared_loss():
            return super()._generate_single_turn(*args, **kwargs)


class OverlappedTrainer(OverlappedGeneration, Trainer):
    """Generate the next completions while training on the current ones."""


class StreamedTrainer(StreamedGeneration, Trainer):
    """Generate continuously, in parallel with training."""


OVERLAPPING = {True: OverlappedTrainer, "stream": StreamedTrainer}


def grpo(config: DictConfig) -> dict[str, Any]:
    loaded = load_once(config, "grpo")
    verifier = build_verifier(config, columns(loaded.rows), loaded.rows)
    heldout_rows = heldout(config)
    if heldout_rows is not None:
        check_rows(config, columns(heldout_rows), heldout_rows, "the held-out rows")
    rewards, weights = verifier.rewards()
    args = build_arguments(GRPOConfig, config)
    args.reward_weights = weights
    cycle = cycle_steps(args)
    if args.use_vllm:
        serving.prepare(config)
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    if args.beta and config.adapter.rank is None:  # TRL loads the reference from files
        source = find_source(config)
        if source is None:
            write_random(config, tokenizer)
        elif source.revision:  # not the newest commit
            args.model_init_kwargs = {"revision": source.revision}
    model = build_model(config)
    if config.topology.servers:
        serving.wait_until_up(args.vllm_server_base_url)
    prompts = prepare_prompts(config, loaded, tokenizer)
    if heldout_rows is not None:
        heldout_rows = prepare_prompts(config, Loaded(heldout_rows), tokenizer, heldout=True)
    trainer = OVERLAPPING.get(config.topology.overlap, Trainer)(
        model=model,
        args=args,
        config=config,
        reward_funcs=rewards,
        train_dataset=prompts,
        eval_dataset=heldout_rows,
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    trainer.use_curriculum(config.data, config.seed, trainer.ahead)
    if args.use_vllm:
        serving.connect(config, trainer)
    metrics = Metrics(config, reference=args.beta != 0.0, stopwatch=trainer.stopwatch)
    result = train(config, trainer, metrics, cycle)
    errors = sum(gather_object([verifier.errors]))
    return {**result, "verifier_errors": errors, **loaded.sha256()}


def cycle_steps(args: GRPOConfig) -> int:
    """Return the number of optimizer steps that use one batch of completions.

    Raises UserError if `save_steps` is not a multiple of this number.
    """
    micro_steps = args.steps_per_generation * args.num_iterations
    steps, rest = divmod(micro_steps, args.gradient_accumulation_steps)
    if rest:
        steps = micro_steps  # the first step that ends together with a cycle
    if args.save_strategy == "steps" and args.save_steps % steps:
        multiple = -(-int(args.save_steps) // steps) * steps
        raise UserError(
            f"method.args.save_steps={args.save_steps}: a checkpoint inside a generation cycle of "
            f"{steps} steps cannot be resumed exactly. Use method.args.save_steps={multiple}, or "
            f"another multiple of {steps}."
        )
    return steps


if __name__ == "__main__":
    main(grpo)
