"""What people write in place of an argument or a value of method.args, and what they mean by it. Pure functions on the argument lists."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from launch.errors import near

# Names of other tools and papers -> the argument's
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
# The same -> a key outside method.args
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
# argument -> word -> the word that is meant, where others are nearer in spelling
WORDS = {"optim": {"adam": "adamw_torch", "adamw": "adamw_torch"}, "lr_scheduler_type": {"wsd": "warmup_stable_decay"}}
NUMBER = re.compile(r"([0-9]{1,3}(?:[_,][0-9]{3}){1,4}|[0-9]{1,15}(?:\.[0-9]{0,15})?(?:e[+-]?[0-9]{1,2})?)\s*([km]?)")
TRUE, FALSE = ("true", "yes", "on", "y", "1", "1.0"), ("false", "no", "off", "n", "0", "0.0")
LENGTHS = re.compile(r"length|tokens|sequence")  # 16k of these is 16 * 1024; of steps or rows it is 16 thousand


def argument_meant(name: str, arguments: Collection[str]) -> str:
    """A sentence with the argument or the key that `name` stands for, or '' where nothing is near."""
    if ARGUMENTS.get(name) in arguments:
        return f" Did you mean {ARGUMENTS[name]}?"
    return f" Use: {KEYS[name]}." if name in KEYS else near(name, arguments)


def word_meant(argument: str, word: str, words: Collection[str]) -> str:
    meant = WORDS.get(argument, {}).get(word.lower())
    return f" Did you mean {meant}?" if meant in words else near(word.lower(), words)


def value_meant(key: str, given: Any, entry: dict[str, Any]) -> str:
    """A sentence with the value of the right type that `given` stands for, or '' where none does."""
    found = _converted(key.rpartition(".")[2], given, entry)
    return "" if found is None else f" Use: {key}={_shown(found)}."


def _converted(argument: str, given: Any, entry: dict[str, Any]) -> Any:
    """A value of one of the entry's types, or None."""
    types = entry["types"]
    if given is None:
        return entry["default"]
    if isinstance(given, list):
        return given[0] if len(given) == 1 and isinstance(given[0], str) and "str" in types else None
    if isinstance(given, bool):
        return next((word for word in ("no", "none") if not given and word in entry.get("names", ())), None)
    if "bool" in types and str(given).lower() in (*TRUE, *FALSE):
        return str(given).lower() in TRUE
    number = _number(given, 1024 if LENGTHS.search(argument) else 1000)
    if number is not None and "int" in types and number == int(number):
        return int(number)
    if number is not None and "float" in types:
        return number
    if "list" in types:
        return [one.strip() for one in given.split(",")] if isinstance(given, str) else [given]
    return None


def _number(given: Any, kilo: int) -> float | None:
    """16k, 1e3, 1_000 and 1,000 as people mean them."""
    read = NUMBER.fullmatch(str(given).strip().lower())
    if read is None:
        return None
    return float(re.sub("[_,]", "", read[1])) * {"": 1, "k": kilo, "m": kilo**2}[read[2]]


def _shown(value: Any) -> str:
    """As an override has it; a word that a file of YAML would read as a bool is quoted."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if isinstance(value, str) and value not in ("no", ""):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
