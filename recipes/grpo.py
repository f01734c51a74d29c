"""GRPO: sample several completions a prompt, reward them, and make those better than their group's mean more likely.

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=grpo model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=grpo model=qwen3_4b          (one generates, seven train)

Departs from the paper (DeepSeekMath, arXiv:2402.03300) as TRL's defaults do: no KL term (beta 0, so no reference model), and the loss
is averaged over the tokens of the whole batch (`dapo`, arXiv:2503.14476), where the paper averages within each completion.

TRL's state inside a generation cycle is no part of a checkpoint, so checkpoints are taken between cycles only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from omegaconf import DictConfig
from trl import GRPOConfig, GRPOTrainer

from recipes.common.checkpoint import HEARTBEAT, AtomicCheckpoints
from recipes.common.data import columns, texts
from recipes.common.data_curriculum import Curriculum
from recipes.common.data_files import check_tests
from recipes.common.data_prepare import heldout_prompts, load_once, prepare_prompts
from recipes.common.errors import UserError
from recipes.common.generation import beat_by_token
from recipes.common.grpo_step import PackedCompletions
from recipes.common.layers import CompiledLayers
from recipes.common.metrics import Metrics
from recipes.common.model import adapter_config, build_model, build_tokenizer
from recipes.common.overlap import OverlappedGeneration
from recipes.common.program import main
from recipes.common.sampling_ratio import SamplingRatio
from recipes.common.selection import heldout
from recipes.common.serving import (
    CheckWeightsArrive,
    check_vllm,
    give_up_where_refused,
    pass_engine_args,
    reach_directly,
    send_merged,
)
from recipes.common.step_shares import TimedStep
from recipes.common.stream import StreamedGeneration
from recipes.common.training import build_arguments, train
from recipes.common.verify import build_verifier, check_columns


class Trainer(TimedStep, CompiledLayers, SamplingRatio, PackedCompletions, Curriculum, AtomicCheckpoints, GRPOTrainer):
    """TRL's trainer, saving atomically, with completions packed, prompts drawn by a curriculum where one is asked for, the
    seconds of a step by kind, and no hang while it generates."""

    ahead = 0  # generations that are read before the one that is trained on is done

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with beat_by_token(self.model, Path(self.args.output_dir).with_name(HEARTBEAT)):
            return super()._generate_single_turn(*args, **kwargs)


class OverlappedTrainer(OverlappedGeneration, Trainer):
    """The same, generating ahead."""


class StreamedTrainer(StreamedGeneration, Trainer):
    """The same, generating all the time."""


TRAINERS = {False: Trainer, True: OverlappedTrainer, "stream": StreamedTrainer}


def grpo(config: DictConfig) -> dict[str, Any]:
    loaded = load_once(config, "grpo")
    verifier = build_verifier(config, columns(loaded.rows))
    check_tests(config, loaded.rows)
    questions = heldout(config)
    if questions is not None:
        check_columns(config, columns(questions), "the held-out rows")
        check_tests(config, questions)
    rewards, weights = verifier.rewards()
    args = build_arguments(GRPOConfig, config)
    args.reward_weights = weights
    cycle = cycle_steps(args)
    if args.use_vllm:
        check_vllm()
        reach_directly()
        give_up_where_refused(config)
        pass_engine_args(config)
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    trainer = TRAINERS[config.topology.overlap](
        model=build_model(config),
        args=args,
        config=config,
        reward_funcs=rewards,
        train_dataset=prepare_prompts(config, loaded, tokenizer),
        eval_dataset=heldout_prompts(config, questions, tokenizer) if questions is not None else None,
        processing_class=tokenizer,
        peft_config=adapter_config(config),
    )
    trainer.use(config.data, config.seed, trainer.ahead)
    if args.use_vllm:
        send_merged(trainer)
    if config.topology.servers:
        trainer.add_callback(CheckWeightsArrive(trainer, config.topology.server_max_length, config.topology.servers))
    result = train(config, trainer, Metrics(config, reference=args.beta != 0.0, stopwatch=trainer.stopwatch), cycle)
    errors = sum(gather_object([verifier.errors]))
    return {**result, "verifier_errors": errors, **loaded.sha256()}


def cycle_steps(args: GRPOConfig) -> int:
    """Optimizer steps that one batch of completions serves. Raises UserError where `save_steps` would fall inside."""
    micro_steps = args.steps_per_generation * args.num_iterations
    steps, rest = divmod(micro_steps, args.gradient_accumulation_steps)
    if rest:
        steps = micro_steps  # cycles and steps meet again after this many
    if args.save_strategy == "steps" and args.save_steps % steps:
        raise UserError(
            f"method.args.save_steps={args.save_steps}: a checkpoint inside a generation cycle of {steps} steps cannot be resumed exactly. "
            f"Use a multiple of {steps}, for example {-(-int(args.save_steps) // steps) * steps}."
        )
    return steps


if __name__ == "__main__":
    main(grpo)
