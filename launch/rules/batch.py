"""Define rules about the completions of one GRPO generation."""

from __future__ import annotations

from launch.estimate.batch import batch, fitting_batches, generation_batch, whole_generations
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.trainer_args import argument, value


def _num_problems(config: Config) -> int:
    return min(int(n) for n in (config.data.num_train, config.data.limit) if n)


def _num_prompts(config: Config) -> int:
    return generation_batch(config) // int(value(config, "num_generations"))


def _groups_remedy(config: Config) -> str:
    size, total = batch(config), generation_batch(config)
    groups = int(value(config, "num_generations"))
    divisor = max((n for n in range(2, groups + 1) if total % n == 0), default=total)
    # The accumulation makes up a generation only if steps_per_generation is not set.
    steps = argument(config, "steps_per_generation")
    key = ""
    if argument(config, "generation_batch_size"):
        key = "method.args.generation_batch_size"
    elif config.effective_batch and not steps:
        key = "effective_batch"
    if key:
        batches = " or ".join(f"{key}={n}" for n in whole_generations(config))
    else:
        name = "steps_per_generation" if steps else "gradient_accumulation_steps"
        pairs = [f"{b} x {a} ({b * a * size.ranks})" for b, a in fitting_batches(config)]
        batches = (
            f"method.args.per_device_train_batch_size x {name} that divide on {size.ranks} "
            f"rank(s): {', '.join(pairs)}"
        )
    return f"{batches}; or method.args.num_generations={divisor}"


BATCH_RULES = [
    Rule(
        "groups_divide",
        lambda c: (
            c.method.generates and generation_batch(c) % int(value(c, "num_generations")) != 0
        ),
        lambda c: (
            f"method.args.num_generations={value(c, 'num_generations')} does not divide the "
            f"{generation_batch(c)} completions of a generation on {batch(c).ranks} rank(s)"
        ),
        _groups_remedy,
    ),
    # TRL's RepeatSampler drops rows that fill no whole generation. Without a whole one it trains no
    # step, and reports that only after startup.
    Rule(
        "generation_data",
        lambda c: (
            c.method.generates
            and c.data.kind in ("reasoning", "code")
            and _num_problems(c) < _num_prompts(c)
        ),
        lambda c: (
            f"data.num_train, data.limit: {_num_problems(c)} problem(s), but one generation takes "
            f"{_num_prompts(c)}"
        ),
        lambda c: (
            f"data.num_train={_num_prompts(c)} or more, or a smaller "
            "method.args.per_device_train_batch_size"
        ),
    ),
]
