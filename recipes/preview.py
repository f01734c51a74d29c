"""What the model will really see: the first rows of a run's data, token by token, with what counts in the loss.

Started by the launcher on the CPU, for method=sft, dpo and grpo; it leaves no run:

    python launch/run.py data.preview=5
    python launch/run.py data=jsonl data.path=tests/data/sft.jsonl data.preview=2

Rows go through the run's own trainer and its collator, around a model of one small layer in place of the run's: tokens, mask, cuts and
packing are those of the run, and no weights are read. It prepares all rows, so that the run finds them prepared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, SFTConfig

from recipes.common.data import Loaded, texts
from recipes.common.data_prepare import load_once, prepare_prompts
from recipes.common.model import build_tokenizer
from recipes.common.program import main

# What the run's processes need and a look at its rows does not.
LEFT_OUT = ("fsdp", "fsdp_config", "deepspeed", "report_to", "torch_compile", "use_liger_kernel", "optim", "max_steps", "eval_strategy")
IGNORED = -100  # the label of a token that does not count in the loss
SIDES = {"chosen": "answer that is preferred", "rejected": "answer that is not"}


def preview(config: DictConfig) -> dict[str, Any]:
    loaded = load_once(config, config.method.name)
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    console = Console(width=120, highlight=False, soft_wrap=True)
    show = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}[config.method.name]
    show(config, loaded, tokenizer, console)
    described = Path(config.run_dir) / "data.json"
    if described.is_file():  # there is none of a stream
        console.print(Text(summary(json.loads(described.read_text(encoding="utf-8")))))
    return {}


def _sft(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    from recipes.sft import Trainer

    args = SFTConfig(**_arguments(config))
    trainer = Trainer(model=_model(tokenizer), args=args, processing_class=tokenizer, config=config, loaded=loaded)
    for number, row in enumerate(_first(trainer.train_dataset, config.data.preview), start=1):
        batch = trainer.data_collator([row])
        _print(console, f"row {number}", tokenizer, batch["input_ids"][0].tolist(), [n != IGNORED for n in batch["labels"][0].tolist()])


def _dpo(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    from recipes.dpo import Trainer

    args = DPOConfig(**_arguments(config) | {"precompute_ref_log_probs": False})
    trainer = Trainer(
        model=_model(tokenizer), ref_model=_model(tokenizer), args=args, processing_class=tokenizer, config=config, loaded=loaded
    )
    for number, row in enumerate(_first(trainer.train_dataset, config.data.preview), start=1):
        batch = trainer.data_collator([row])
        for n, (side, meaning) in enumerate(SIDES.items()):
            real = batch["attention_mask"][n].bool()
            ids, mask = batch["input_ids"][n][real].tolist(), batch["completion_mask"][n][real].bool().tolist()
            _print(console, f"row {number}, {side}: the {meaning}", tokenizer, ids, mask)


def _grpo(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    for number, row in enumerate(_first(prepare_prompts(config, loaded, tokenizer), config.data.preview), start=1):
        conversational = not isinstance(row["prompt"], str)
        prompt = (
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) if conversational else row["prompt"]
        )
        ids = tokenizer(prompt, add_special_tokens=not conversational)["input_ids"]
        _print(console, f"row {number}: the prompt; what is generated after it counts", tokenizer, ids, [False] * len(ids))
        for name, value in row.items():
            if name != "prompt":
                console.print(Text(f"    {name} (for rewards): {str(value)[:100]}"))


def _arguments(config: DictConfig) -> dict[str, Any]:
    given = {key: value for key, value in OmegaConf.to_container(config.trainer_args).items() if key not in LEFT_OUT}
    return given | {"use_cpu": True, "bf16": False, "fp16": False, "report_to": "none", "max_steps": 1}


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """One layer with the tokenizer's vocabulary; the trainers want a model to be given."""
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**size, head_dim=32, vocab_size=len(tokenizer)))


def _first(rows: Any, number: int) -> list[dict[str, Any]]:
    return list(rows.take(number)) if hasattr(rows, "take") else [rows[n] for n in range(min(number, len(rows)))]


def _print(console: Console, title: str, tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> None:
    """Tokens side by side, `+` before those that count, then one a line with its number and text."""
    console.print(Text(f"\n{title}: {len(ids)} tokens, {sum(mask)} in the loss", style="bold"))
    line = Text("  ")
    for token, counts in zip(ids, mask, strict=True):
        line.append(repr(tokenizer.decode([token]))[1:-1], style="green" if counts else "dim")
        line.append("|", style="dim")
    console.print(line)
    for n, (token, counts) in enumerate(zip(ids, mask, strict=True)):
        text = f"  {n:5} {token:7} {'loss' if counts else '-':4} {tokenizer.decode([token])!r}"
        console.print(Text(text, style="green" if counts else "dim"))


def summary(found: dict[str, Any]) -> str:
    """Rows, lengths with their histogram, what is cut and how full batches are."""
    length, most = found["length"], max(n for _, _, n in found["histogram"])
    lines = [
        f"\n{found['rows']} rows, {found['tokens']} tokens; lengths {length['shortest']} to {length['longest']}, mean {length['mean']:.1f}",
        *(f"  {low:6} to {high:6} {n:8} {'#' * round(40 * n / most)}" for low, high, n in found["histogram"]),
    ]
    lines += [f"{found['truncated']} cut to method.args.max_length={found['max_length']}"] if found["max_length"] else []
    if found["efficiency"] is not None:
        how = f"packed into {found['packed_rows']} rows" if found["packing"] else "not packed"
        lines.append(f"{found['efficiency']:.1%} of a batch's places hold a token ({how})")
    lines += [f"{key}: {found[key]}" for key in ("filtered", "duplicates", "held_out", "prompts_without_pair") if found.get(key)]
    return "\n".join(lines)


if __name__ == "__main__":
    main(preview)
