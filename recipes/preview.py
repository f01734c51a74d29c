"""Print the tokens and the loss mask of the first rows and, for GRPO, what rewards give for them.

The launcher starts this program on the CPU, for method=sft, dpo and grpo, without a run directory:

    python launch/run.py data.preview=5
    python launch/run.py data=jsonl data.path=tests/data/sft.jsonl data.preview=2

The run's trainer and collator process the rows, so tokens, mask, truncation and packing equal the
run's. The trainer has a tiny model, so no weights are read. All rows are prepared, and the run
reuses them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, SFTConfig

from recipes.data.data_load import Loaded, texts
from recipes.data.data_prepare import load_once, prepare_prompts
from recipes.data.data_select import Row
from recipes.data.data_tokens import IGNORED
from recipes.models.model_build import build_tokenizer
from recipes.rank.program import main
from recipes.rewards.reward_functions import CODE_TESTS
from recipes.rewards.verifier import LEFT_CHAIN, build_verifier
from recipes.sampling.samples import completion

# Trainer arguments that a preview omits.
OMITTED_ARGS = (
    *("fsdp", "fsdp_config", "deepspeed", "torch_compile", "use_liger_kernel", "optim"),
    "eval_strategy",
)
ON_CPU = {"use_cpu": True, "bf16": False, "fp16": False, "report_to": "none", "max_steps": 1}
# Title, token ids, loss mask, and other columns
PreviewRow = tuple[str, list[int], list[bool], dict[str, Any]]
SIDES = {"chosen": "preferred answer", "rejected": "other answer"}


def preview(config: DictConfig) -> dict[str, Any]:
    loaded = load_once(config, config.method.name)
    tokenizer = build_tokenizer(config, texts(loaded.rows))
    console = Console(width=120, highlight=False, soft_wrap=True)
    prompts: list[Row] = []
    if config.method.name == "grpo":
        rows = prepare_prompts(config, loaded, tokenizer)
        prompts = list(itertools.islice(rows, config.data.preview))
    shown = _prompts(config, prompts, tokenizer)
    if not prompts:
        shown = _training_rows(config, loaded, tokenizer)
    for title, ids, mask, columns in shown:
        head = f"\n{title}: {len(ids)} tokens, {sum(mask)} in the loss"
        console.print(Text(head, style="bold"))
        for n, (token, in_loss) in enumerate(zip(ids, mask, strict=True)):
            text = f"  {n:5} {token:7} {'loss' if in_loss else '-':4} {tokenizer.decode([token])!r}"
            console.print(Text(text, style="green" if in_loss else "dim"))
        for name, value in columns.items():
            console.print(Text(f"    {name} (for rewards): {str(value)[:100]}"))
    description = Path(config.run_dir) / "data.json"
    if description.is_file():  # streamed data has none
        facts = json.loads(description.read_text(encoding="utf-8"))
        console.print(Text("\n" + yaml.safe_dump(facts, sort_keys=False, default_flow_style=None)))
    for line in reward_lines(config, prompts):  # last, because an invalid reward ends the preview
        console.print(Text(line))
    return {}


def reward_lines(config: DictConfig, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what each reward gives for each row's `answer` and for an empty completion.

    They are one batch, scored as in training, but without code_tests. Raises UserError as training
    would.
    """
    if not rows:
        return
    cases = []
    for number, row in enumerate(rows, start=1):
        if row.get("answer") is not None:
            cases.append((number, row, "the row's answer", str(row["answer"])))
        cases.append((number, row, "an empty completion", ""))
    prompts = [row["prompt"] for _, row, *_ in cases]
    completions = [completion(row["prompt"], text) for _, row, _, text in cases]
    names = [name for name in rows[0] if name != "prompt"]
    columns = {name: [row[name] for _, row, *_ in cases] for name in names}
    verifier = build_verifier(config, names, rows)
    if verifier.judges.pop(CODE_TESTS, None):
        yield f"reward {CODE_TESTS}: not scored here, because it needs the run's sandbox"
        verifier.chain = [name for name in verifier.chain if name != CODE_TESTS]
    judged = verifier.judge(prompts, completions, columns)
    for name in verifier.judges:
        by_row: dict[int, list[str]] = {}
        for (number, _, what, _), judgments in zip(cases, judged, strict=True):
            score, error = judgments[name]
            value = "none" if score is None else f"{score:g}"
            if judgments[name] is LEFT_CHAIN:
                value, error = "-", "not scored, because it left method.reward_chain"
            text = f"{value} for {what}{f' ({error})' if error else ''}"
            by_row.setdefault(number, []).append(text)
        for number, scores in by_row.items():
            yield f"reward {name}, row {number}: {', '.join(scores)}"


def make_trainer(config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the method's trainer on the CPU, with one-layer models."""
    from recipes import dpo, sft

    arguments = OmegaConf.to_container(config.trainer_args)
    arguments = {key: arguments[key] for key in arguments if key not in OMITTED_ARGS} | ON_CPU
    common = {"processing_class": tokenizer, "config": config, "loaded": loaded}
    if config.method.name == "sft":
        return sft.Trainer(one_layer(tokenizer), args=SFTConfig(**arguments), **common)
    args = DPOConfig(**arguments | {"precompute_ref_log_probs": False})
    return dpo.Trainer(one_layer(tokenizer), one_layer(tokenizer), args=args, **common)


def one_layer(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Return a one-layer model with the tokenizer's vocabulary."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**size, **heads, vocab_size=len(tokenizer)))


def _training_rows(
    config: DictConfig, loaded: Loaded, tokenizer: PreTrainedTokenizerBase
) -> Iterator[PreviewRow]:
    trainer = make_trainer(config, loaded, tokenizer)
    rows = itertools.islice(trainer.train_dataset, config.data.preview)
    for number, row in enumerate(rows, start=1):
        batch = trainer.data_collator([row])
        ids = batch["input_ids"]
        if config.method.name == "dpo":
            for n, (side, meaning) in enumerate(SIDES.items()):
                real = batch["attention_mask"][n].bool()
                mask = batch["completion_mask"][n][real].bool().tolist()
                yield f"row {number}, {side}: the {meaning}", ids[n][real].tolist(), mask, {}
            continue
        if "labels" in batch:  # TRL's collator
            mask = (batch["labels"][0] != IGNORED).tolist()
        else:  # our collator's target_positions are one before each target
            targets = set((batch["target_positions"] + 1).tolist())
            mask = [n in targets for n in range(ids.shape[1])]
        yield f"row {number}", ids[0].tolist(), mask, {}


def _prompts(
    config: DictConfig, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
) -> Iterator[PreviewRow]:
    options = config.trainer_args.get("chat_template_kwargs") or {}
    for number, row in enumerate(rows, start=1):
        prompt = row["prompt"]
        plain = isinstance(prompt, str)
        if not plain:
            prompt = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **options
            )
        ids = tokenizer(prompt, add_special_tokens=plain)["input_ids"]
        title = f"row {number}: the prompt, after which the model generates"
        columns = {name: value for name, value in row.items() if name != "prompt"}
        yield title, ids, [False] * len(ids), columns


if __name__ == "__main__":
    main(preview)
