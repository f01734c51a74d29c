"""Guess what users mean by a wrong argument, value or field. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from launch.core.errors import near

# Names of other tools and papers -> argument of method.args
ARGUMENTS = {
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "grad_accum": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "seq_len": "max_length",
    "max_seq_len": "max_length",
    "sequence_length": "max_length",
    "context_length": "max_length",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "kl_coef": "beta",
    "group_size": "num_generations",
    "loss": "loss_type",
}
# Names of other tools and papers -> key outside method.args
KEYS = {
    "attn_implementation": "hardware.attention=sdpa, or another kernel",
    "attention": "hardware.attention=sdpa, or another kernel",
    "gpus": "topology.num_gpus=<n>",
    "num_gpus": "topology.num_gpus=<n>",
    "dtype": "precision=<option>",
    "torch_dtype": "precision=<option>",
    "lora_r": "adapter=lora adapter.rank=<n>",
    "lora_rank": "adapter=lora adapter.rank=<n>",
    "lora_alpha": "adapter=lora adapter.alpha=<n>",
    "lora_dropout": "adapter=lora adapter.dropout=<share>",
    "lora_target_modules": "adapter=lora adapter.target_modules=[q_proj,v_proj]",
    "target_modules": "adapter=lora adapter.target_modules=[q_proj,v_proj]",
    "load_in_4bit": "adapter=qlora precision=nf4",
    "model_name_or_path": "model.path=<directory> or model.hub_id=<owner/name>",
}
# argument -> wrong word -> the word that is meant, if others are nearer in spelling
WORDS = {
    "optim": {"adam": "adamw_torch", "adamw": "adamw_torch"},
    "lr_scheduler_type": {"wsd": "warmup_stable_decay"},
}
NUMBER = re.compile(
    r"([0-9]{1,3}(?:[_,][0-9]{3}){1,4}|[0-9]{1,15}(?:\.[0-9]{0,15})?(?:e[+-]?[0-9]{1,2})?)\s*([km]?)"
)
TRUE, FALSE = ("true", "yes", "on", "y", "1", "1.0"), ("false", "no", "off", "n", "0", "0.0")
# For these arguments 16k is 16 * 1024; 16k steps or rows are 16,000.
LENGTHS = re.compile(r"length|tokens|sequence")
# Fields of other programs' rows, and how to turn them into TRL's fields.
RENAMINGS = (
    (
        {"conversations"},
        "rename conversations to messages, in its turns from to role (human: user, gpt: "
        "assistant), value to content",
    ),
    (
        {"instruction", "output"},
        "join instruction and input as prompt, and rename output to completion (sft) or answer "
        "(grpo, evaluate)",
    ),
)


def renaming(fields: Collection[str]) -> str | None:
    """Return how to turn a row with another program's fields into TRL's; None if unknown."""
    return next((remedy for names, remedy in RENAMINGS if names <= {*fields}), None)


def argument_meant(name: str, arguments: Collection[str]) -> str:
    """Return a hint at the argument or key that the user may mean by `name`; '' if none is near."""
    if ARGUMENTS.get(name) in arguments:
        return f" Did you mean {ARGUMENTS[name]}?"
    return f" Use: {KEYS[name]}." if name in KEYS else near(name, arguments)


def word_meant(argument: str, word: str, words: Collection[str]) -> str:
    meant = WORDS.get(argument, {}).get(word.lower())
    return f" Did you mean {meant}?" if meant in words else near(word.lower(), words)


def value_meant(key: str, value: Any, entry: dict[str, Any]) -> str:
    """Return a hint at a value of the right type that `value` may mean, or ''."""
    converted = _converted(key.rpartition(".")[2], value, entry)
    return "" if converted is None else f" Use: {key}={_shown(converted)}."


def _converted(argument: str, value: Any, entry: dict[str, Any]) -> Any:
    """Return `value` converted to one of the entry's types; None if that is impossible."""
    types = entry["types"]
    if value is None:
        return entry["default"]
    if isinstance(value, list):
        is_word = len(value) == 1 and isinstance(value[0], str) and "str" in types
        return value[0] if is_word else None
    if isinstance(value, bool):
        words = [word for word in ("no", "none") if word in entry.get("names", ())]
        return None if value or not words else words[0]
    if "bool" in types and str(value).lower() in (*TRUE, *FALSE):
        return str(value).lower() in TRUE
    if match := NUMBER.fullmatch(str(value).strip().lower()):  # 16k, 1e3, 1_000, 1,000
        kilo = 1024 if LENGTHS.search(argument) else 1000
        number = float(re.sub("[_,]", "", match[1])) * {"": 1, "k": kilo, "m": kilo**2}[match[2]]
        if "int" in types and number == int(number):
            return int(number)
        if "float" in types:
            return number
    if "list" in types:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
    return None


def _shown(value: Any) -> str:
    """Format a value as an override; quote a word that YAML would read as a bool."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if isinstance(value, str) and value not in ("no", ""):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
