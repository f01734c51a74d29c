"""Show what the model will see: the first rows, token by token, with what counts in the loss.

Started by the launcher on the CPU, for method=sft, dpo and grpo; it leaves no run:

    python launch/run.py data.preview=5
    python launch/run.py data=jsonl data.path=tests/data/sft.jsonl data.preview=2

Rows go through the run's own trainer and collator, around a model of one small layer: tokens, mask,
cuts and packing are those of the run, and no weights are read. All rows are prepared, so that the
run finds them prepared.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, SFTConfig

from recipes.data.data import Loaded, texts
from recipes.data.data_prepare import load_once, prepare_prompts
from recipes.models.model import build_tokenizer
from recipes.rank.program import main

# Trainer arguments that a preview does not need.
LEFT_OUT = (
    *("fsdp", "fsdp_config", "deepspeed", "torch_compile", "use_liger_kernel", "optim"),
    "eval_strategy",
)
ON_CPU = {"use_cpu": True, "bf16": False, "fp16": False, "report_to": "none", "max_steps": 1}
IGNORED = -100  # the label of a token that does not count in the loss
SIDES = {"chosen": "answer that is preferred", "rejected": "answer that is not"}


def preview(config: DictConfig) -> dict[str, Any]:
    loaded = load_once(config, config.method.name)
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    console = Console(width=120, highlight=False, soft_wrap=True)
    show = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}[config.method.name]
    show(config, loaded, tokenizer, console)
    described = Path(config.run_dir) / "data.json"
    if described.is_file():  # not for a stream
        console.print(Text(summary(json.loads(described.read_text(encoding="utf-8")))))
    return {}


def _sft(
    config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    from recipes.sft import Trainer

    args = SFTConfig(**_arguments(config))
    trainer = Trainer(
        model=_model(tokenizer), args=args, processing_class=tokenizer, config=config, loaded=loaded
    )
    for number, row in enumerate(_first(trainer.train_dataset, config.data.preview), start=1):
        batch = trainer.data_collator([row])
        _print(console, f"row {number}", tokenizer, batch["input_ids"][0].tolist(), _counted(batch))


def _counted(batch: dict[str, Any]) -> list[bool]:
    """Return, for each token of a batch of one row, whether it counts in the loss.

    TRL's batches have labels; ours have the positions before the targets.
    """
    if "labels" in batch:
        return [label != IGNORED for label in batch["labels"][0].tolist()]
    targets = set((batch["target_positions"] + 1).tolist())
    return [n in targets for n in range(batch["input_ids"].shape[1])]


def _dpo(
    config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    from recipes.dpo import Trainer

    args = DPOConfig(**_arguments(config) | {"precompute_ref_log_probs": False})
    trainer = Trainer(
        model=_model(tokenizer),
        ref_model=_model(tokenizer),
        args=args,
        processing_class=tokenizer,
        config=config,
        loaded=loaded,
    )
    for number, row in enumerate(_first(trainer.train_dataset, config.data.preview), start=1):
        batch = trainer.data_collator([row])
        for n, (side, meaning) in enumerate(SIDES.items()):
            real = batch["attention_mask"][n].bool()
            ids = batch["input_ids"][n][real].tolist()
            mask = batch["completion_mask"][n][real].bool().tolist()
            _print(console, f"row {number}, {side}: the {meaning}", tokenizer, ids, mask)


def _grpo(
    config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    rows = _first(prepare_prompts(config, loaded, tokenizer), config.data.preview)
    for number, row in enumerate(rows, start=1):
        prompt = row["prompt"]
        conversational = not isinstance(prompt, str)
        if conversational:
            prompt = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        ids = tokenizer(prompt, add_special_tokens=not conversational)["input_ids"]
        title = f"row {number}: the prompt; what is generated after it counts"
        _print(console, title, tokenizer, ids, [False] * len(ids))
        for name, value in row.items():
            if name != "prompt":
                console.print(Text(f"    {name} (for rewards): {str(value)[:100]}"))


def _arguments(config: DictConfig) -> dict[str, Any]:
    arguments = OmegaConf.to_container(config.trainer_args)
    return {key: value for key, value in arguments.items() if key not in LEFT_OUT} | ON_CPU


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a model of one layer with the tokenizer's vocabulary, since trainers need a model."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**size, **heads, vocab_size=len(tokenizer)))


def _first(rows: Any, number: int) -> list[dict[str, Any]]:
    return list(itertools.islice(rows, number))


def _print(
    console: Console,
    title: str,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    mask: list[bool],
) -> None:
    """Print tokens on one line, green if they count, then each on its own line with its id."""
    console.print(Text(f"\n{title}: {len(ids)} tokens, {sum(mask)} in the loss", style="bold"))
    line = Text("  ")
    for token, counts in zip(ids, mask, strict=True):
        line.append(repr(tokenizer.decode([token]))[1:-1], style="green" if counts else "dim")
        line.append("|", style="dim")
    console.print(line)
    for n, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        text = f"  {n:5} {token:7} {'loss' if counts else '-':4} {tokenizer.decode([token])!r}"
        console.print(Text(text, style="green" if counts else "dim"))


def summary(data: dict[str, Any]) -> str:
    """Return a text on rows, the histogram of lengths, truncation, and how full batches are."""
    length, most = data["length"], max(n for _, _, n in data["histogram"])
    lines = [
        f"\n{data['rows']} rows, {data['tokens']} tokens; lengths {length['shortest']} to "
        f"{length['longest']}, mean {length['mean']:.1f}"
    ]
    for low, high, n in data["histogram"]:
        lines.append(f"  {low:6} to {high:6} {n:8} {'#' * round(40 * n / most)}")
    if data["max_length"]:
        lines.append(f"{data['truncated']} cut to method.args.max_length={data['max_length']}")
    if data["efficiency"] is not None:
        packing = f"packed into {data['packed_rows']} rows" if data["packing"] else "not packed"
        lines.append(f"{data['efficiency']:.1%} of a batch's places hold a token ({packing})")
    for key in ("filtered", "duplicates", "held_out", "prompts_without_pair"):
        if data.get(key):
            lines.append(f"{key}: {data[key]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(preview)
