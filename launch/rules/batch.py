"""Define rules about steps, batches, and GRPO's generations."""

from __future__ import annotations

from launch.estimate.batch import batch, fitting_batches, generation_batch, whole_generations
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.data import LrScaling
from launch.schema.trainer_args import argument, value


def _batch_does_not_divide(config: Config) -> bool:
    return (
        config.method.generates
        and generation_batch(config) % int(value(config, "num_generations")) != 0
    )


def _problems(config: Config) -> int:
    return min(int(n) for n in (config.data.num_train, config.data.limit) if n)


def _prompts_at_once(config: Config) -> int:
    return generation_batch(config) // int(value(config, "num_generations"))


def _batches_that_would_do(config: Config) -> str:
    size, group = batch(config), f"or method.args.num_generations={_largest_divisor(config)}"
    if argument(config, "generation_batch_size"):
        return f"{_generations_that_would_do(config)}; {group}"
    if config.effective_batch and not argument(config, "steps_per_generation"):
        return f"{_generations_that_would_do(config, 'effective_batch')}; {group}"
    # The accumulation makes up a generation only if steps_per_generation is not set.
    given = argument(config, "steps_per_generation")
    name = "steps_per_generation" if given else "gradient_accumulation_steps"
    pairs = [f"{b} x {a} ({b * a * size.ranks})" for b, a in fitting_batches(config)]
    return (
        f"method.args.per_device_train_batch_size x {name} that would do on {size.ranks} "
        f"rank(s): {', '.join(pairs)}; {group}"
    )


def _generations_that_would_do(
    config: Config, key: str = "method.args.generation_batch_size"
) -> str:
    return " or ".join(f"{key}={n}" for n in whole_generations(config))


def _largest_divisor(config: Config) -> int:
    total, wanted = generation_batch(config), int(value(config, "num_generations"))
    return max((n for n in range(2, wanted + 1) if total % n == 0), default=total)


BATCH_RULES = [
    Rule(
        "groups_divide",
        _batch_does_not_divide,
        lambda c: (
            f"method.args.num_generations={value(c, 'num_generations')} does not divide the "
            f"{generation_batch(c)} completions of a generation on {batch(c).ranks} rank(s)"
        ),
        _batches_that_would_do,
    ),
    Rule(
        "groups_and_smaller_batches",
        lambda c: c.method.generates and bool(argument(c, "auto_find_batch_size")),
        "method.args.auto_find_batch_size=true: a smaller batch may cut a group of completions",
        "method.args.auto_find_batch_size=false; mode=plan find=largest_batch plans what fits",
    ),
    # TRL's RepeatSampler drops rows that fill no whole generation. Without a whole one it trains no
    # step, and reports that only after startup.
    Rule(
        "generation_data",
        lambda c: (
            c.method.generates
            and c.data.kind in ("reasoning", "code")
            and _problems(c) < _prompts_at_once(c)
        ),
        lambda c: (
            f"data.num_train, data.limit: {_problems(c)} problem(s), but one generation takes "
            f"{_prompts_at_once(c)}"
        ),
        lambda c: (
            f"data.num_train={_prompts_at_once(c)} or more, or a smaller "
            "method.args.per_device_train_batch_size"
        ),
    ),
    Rule(
        "lr_scaling",
        lambda c: (
            (c.method.lr_scaling != LrScaling.none) != (c.method.lr_reference_batch is not None)
        ),
        "method.lr_scaling and method.lr_reference_batch need each other",
        "both, for example method.lr_scaling=sqrt method.lr_reference_batch=32, or none of them",
    ),
]
