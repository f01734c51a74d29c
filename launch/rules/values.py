"""Reject values outside a list of words or a range, before any rule reads them.

The schema declares these next to its fields. The tables here are for arguments of a method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launch.core.errors import UserError, near
from launch.schema import Config
from launch.schema.checked import DIVIDED, Range, Text
from launch.schema.trainer_args import class_of, known

Allowed = Range | Text | tuple[Any, ...]
FINITE = Range()
FROM_0, FROM_1, ABOVE_0 = Range(least=0), Range(least=1), Range(above=0)
BELOW_1 = Range(least=0, below=1)
SHARE = Range(above=0, most=1)
# Names that huggingface_hub's validate_repo_id accepts, with an owner.
REPOSITORY = Text(
    "a repository of the hub",
    "<owner/name>",
    r"(?a)(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?",
)
ARGUMENTS: dict[str, Allowed] = {
    "push_to": REPOSITORY,
    "engine": ("transformers", "vllm"),  # as in recipes/sampling/generation.py
    # TRL rejects another only after the first generation
    "vllm_importance_sampling_mode": (
        *("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    ),
    "base": ("continued", "fresh"),  # the model that a cycle of RAFT starts from
    # smaller group sizes are tried one by one if it does not divide a generation; in a group of
    # one, nothing is above the mean
    "num_generations": Range(least=2, most=100_000),
    "per_device_train_batch_size": Range(least=1, most=DIVIDED),
    "generation_batch_size": Range(least=1, most=DIVIDED),
    "timeout_s": Range(above=0, most=86_400),  # a day
    # two or three runs each, all composed and planned first, which takes half a minute
    "cycles": Range(least=1, most=500),
    **dict.fromkeys(
        (
            *("per_device_eval_batch_size", "gradient_accumulation_steps", "num_generations_eval"),
            *("steps_per_generation", "num_iterations", "max_length", "max_completion_length"),
            *("batch_size", "max_new_tokens", "samples_per_prompt", "num_prompts", "per_prompt"),
            *("repetitions", "steps", "dataset_num_proc", "torch_empty_cache_steps", "max_steps"),
        ),
        FROM_1,
    ),
    **dict.fromkeys(
        (
            *("warmup", "learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"),
            *("save_total_limit", "adam_epsilon", "neftune_noise_alpha", "epsilon_high"),
            *("epsilon", "temperature", "top_k"),
        ),
        FROM_0,
    ),
    **dict.fromkeys(
        (
            *("num_train_epochs", "logging_steps", "fail_below", "step_ms", "save_steps"),
            "repetition_penalty",
        ),
        ABOVE_0,
    ),
    **dict.fromkeys(
        (
            *("dropout", "adam_beta1", "adam_beta2", "label_smoothing"),
            "label_smoothing_factor",
        ),
        BELOW_1,
    ),
    **dict.fromkeys(("top_p", "learning_rate_decay", "top_fraction"), SHARE),
    **dict.fromkeys(("min_p", "threshold", "top_entropy_quantile"), Range(least=0, most=1)),
}
# class -> arguments whose meaning depends on the method
OF_CLASS: dict[str, dict[str, Allowed]] = {
    # at 0 the loss does not depend on the model, or divides by beta
    "trl.DPOConfig": {"beta": ABOVE_0},
    # logits are divided by the temperature
    "trl.GRPOConfig": {"beta": FROM_0, "temperature": ABOVE_0, "top_k": FINITE},
    # engine arguments are separate and may have any name
    "recipes.bench.vllm_engine.EngineConfig": {"base": FINITE},
}
NOT_GIVEN = {"max_steps": -1}  # transformers' default: epochs count


def check_values(config: Config) -> None:
    """Raise UserError for the first value outside its list, range or pattern."""
    for key, value, allowed in (*_declared(config, ""), *_arguments(config)):
        check_value(key, value, allowed)


def check_value(key: str, value: Any, allowed: Allowed) -> None:
    """Raise UserError if a value is outside its list, range or pattern."""
    kinds: dict[type, Any] = {Range: (int, float), Text: str, tuple: object}
    if not isinstance(value, kinds[type(allowed)]) or value in allowed:
        return
    if isinstance(allowed, tuple):
        words = [str(word).lower() if isinstance(word, bool) else word for word in allowed]
        raise UserError(f"{key}={value}: it takes {', '.join(words)}.{near(str(value), words)}")
    if isinstance(allowed, Text):
        remedy = f"{key}={allowed.example}; {allowed.meaning}"
        raise UserError(f"{key}={value}: {allowed.fault(value)}. Use: {remedy}.")
    bounds = "a finite number" if allowed == FINITE else f"{allowed}"
    bounds += ", or -1 to count epochs" if key == "method.args.max_steps" else ""
    raise UserError(f"{key}={value}: out of range. Use: {bounds}.")


def _declared(node: Any, prefix: str) -> Iterator[tuple[str, Any, Allowed]]:
    """Yield the declarations of `node`'s fields, and every other float as FINITE."""
    for field in dataclasses.fields(node):
        value, key = getattr(node, field.name), f"{prefix}{field.name}"
        if isinstance(value, dict):
            children = [(f"{key}.{name}", child) for name, child in value.items()]
        elif isinstance(value, list):
            children = [(f"{key}[{number}]", child) for number, child in enumerate(value)]
        else:
            children = [(key, value)]
        for name, child in children:
            if dataclasses.is_dataclass(child):
                yield from _declared(child, f"{name}.")
            elif field.metadata or type(child) is float:
                yield name, child, field.metadata.get("allowed", FINITE)


def _arguments(config: Config) -> Iterator[tuple[str, Any, Allowed]]:
    args, own = config.method.args, {}
    if any(name in args for arguments in OF_CLASS.values() for name in arguments):
        own = OF_CLASS.get(class_of(config), {})
    for name, value in args.items():
        allowed = own.get(name) or ARGUMENTS.get(name, FINITE)
        is_checked = isinstance(value, (int, float, str)) and value != NOT_GIVEN.get(name)
        if is_checked and (allowed is FINITE or name in known(config)):
            yield f"method.args.{name}", value, allowed
