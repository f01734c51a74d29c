"""Rows of check.py's table about steps, batches, and the generations of GRPO."""

from __future__ import annotations

from launch import topology, trainer_args
from launch.batch import batch, fitting_batches, generation_batch, whole_generations
from launch.rules.rule import Rule
from launch.schema import Config
from launch.trainer_args import argument, value


def _batch_does_not_divide(config: Config) -> bool:
    return config.method.name == "grpo" and generation_batch(config) % int(value(config, "num_generations")) != 0


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
    # What is accumulated is a generation's only where nothing else says how many micro-steps share one.
    given = argument(config, "steps_per_generation")
    name = "steps_per_generation" if given else "gradient_accumulation_steps"
    pairs = [f"{b} x {a} ({b * a * size.ranks})" for b, a in fitting_batches(config)]
    return f"method.args.per_device_train_batch_size x {name} that would do on {size.ranks} rank(s): {', '.join(pairs)}; {group}"


def _generations_that_would_do(config: Config, key: str = "method.args.generation_batch_size") -> str:
    return " or ".join(f"{key}={n}" for n in whole_generations(config))


def _generation_does_not_divide(config: Config) -> bool:
    given = argument(config, "generation_batch_size")
    return bool(given) and int(given) % _micro_step(config) != 0


def _largest_divisor(config: Config) -> int:
    total, wanted = generation_batch(config), int(value(config, "num_generations"))
    return max((n for n in range(2, wanted + 1) if total % n == 0), default=total)


def _micro_step(config: Config) -> int:
    """Sequences of all ranks together."""
    return batch(config).per_device * batch(config).ranks


BATCH_RULES = [
    Rule(
        "max_steps",
        lambda c: argument(c, "max_steps") not in (None, -1) and argument(c, "max_steps") < 1,
        lambda c: f"method.args.max_steps={argument(c, 'max_steps')}: a training takes at least one step",
        lambda c: "1 or more; or -1, which is not given: method.args.num_train_epochs counts then",
    ),
    Rule(
        "epochs_and_steps",
        trainer_args.epochs_and_steps,
        lambda c: (
            f"method.args.num_train_epochs={c.method.args['num_train_epochs']} with max_steps={c.method.args['max_steps']}: "
            "max_steps would win without a word"
        ),
        lambda c: "method.args.max_steps=-1 to count epochs, or '~method.args.num_train_epochs' to count steps",
    ),
    Rule(
        "groups_divide",
        _batch_does_not_divide,
        lambda c: (
            f"{generation_batch(c)} completions a generation on {topology.num_trainers(c)} training rank(s) do not divide by "
            f"method.args.num_generations={value(c, 'num_generations')}"
        ),
        _batches_that_would_do,
    ),
    # As trl.GRPOConfig.__post_init__ refuses them, on every rank.
    Rule(
        "generation_divides",
        _generation_does_not_divide,
        lambda c: (
            f"method.args.generation_batch_size={argument(c, 'generation_batch_size')} is no multiple of the {_micro_step(c)} sequences "
            f"that {topology.num_trainers(c)} training rank(s) take at once, {batch(c).per_device} each"
        ),
        lambda c: f"{_generations_that_would_do(c)}; or no generation_batch_size, and method.args.steps_per_generation=N",
    ),
    Rule(
        "generation_twice",
        lambda c: bool(argument(c, "generation_batch_size")) and bool(argument(c, "steps_per_generation")),
        lambda c: (
            f"method.args.generation_batch_size={argument(c, 'generation_batch_size')} with "
            f"steps_per_generation={argument(c, 'steps_per_generation')}: each decides the other, and TRL takes one"
        ),
        lambda c: "one of them",
    ),
    Rule(
        "groups_and_smaller_batches",
        lambda c: c.method.name == "grpo" and bool(argument(c, "auto_find_batch_size")),
        lambda c: "method.args.auto_find_batch_size=true with method=grpo: a smaller batch may cut a group of completions",
        lambda c: "method.args.auto_find_batch_size=false; mode=plan find=largest_batch plans what fits",
    ),
    # As TRL's RepeatSampler, which leaves out what fills no whole generation: with none it trains no step, and says so once all is up.
    Rule(
        "generation_data",
        lambda c: c.method.name == "grpo" and c.data.kind in ("reasoning", "code") and _problems(c) < _prompts_at_once(c),
        lambda c: (
            f"{_problems(c)} problem(s) (data.num_train, data.limit): fewer than the {_prompts_at_once(c)} of one generation, "
            f"{generation_batch(c)} completions of {value(c, 'num_generations')} to a problem"
        ),
        lambda c: f"data.num_train={_prompts_at_once(c)} or more, or a smaller method.args.per_device_train_batch_size",
    ),
]
