"""Accuracy on held-out problems: generate, take the answer out, compare it.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=evaluate model=qwen3_4b
    8 GPUs:  one GPU evaluates; the problems are few
    A run's model:  python launch/run.py method=evaluate model=tiny model.path=<run>/model

Generated problems count as solved when the task's own scorer gives 1, other rows when math-verify finds the answers equal. With
several samples a problem, accuracy is the mean over all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from recipes.common import profiling, rewards
from recipes.common.data import Row, load_heldout, load_train, texts
from recipes.common.errors import UserError
from recipes.common.files import json_sha256
from recipes.common.metrics import append, memory_peak_gb, progress_line
from recipes.common.model import build_model, build_tokenizer
from recipes.common.program import Interrupted, main, say, stop_asked

NUM_SAMPLES_SHOWN = 8


@dataclass
class EvaluateConfig:
    """Arguments of the evaluation; temperature 0 takes the likeliest token. Raises UserError for a value out of range."""

    output_dir: str
    seed: int = 0
    max_new_tokens: int = 512
    temperature: float = 0.0
    samples_per_prompt: int = 1
    batch_size: int = 64
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "samples_per_prompt", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"method.args.{name}={getattr(self, name)}: it must be at least 1.")
        if self.temperature < 0:
            raise UserError(f"method.args.temperature={self.temperature}: it must be 0 (greedy) or more.")


def evaluate(config: DictConfig) -> dict[str, Any]:
    args = EvaluateConfig(**config.trainer_args)
    rows = load_heldout(config.data)
    trained_on = [] if config.model.path or config.model.init != "random" else texts(load_train(config.data, "sft"))
    tokenizer = build_tokenizer(config, trained_on)
    tokenizer.padding_side = "left"  # a batch's prompts must end where its completions begin
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    model = build_model(config).to(device).eval()
    set_seed(args.seed)
    metrics = Path(config.run_dir) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # an interrupted evaluation starts again

    answered: list[Row] = []
    began = time.monotonic()
    starts = range(0, len(rows), args.batch_size)
    with profiling.session(config, len(starts), model=model) as profile:
        for step, start in enumerate(starts, start=1):
            batch = [row for row in rows[start : start + args.batch_size] for _ in range(args.samples_per_prompt)]
            completions, num_tokens = generate(model, tokenizer, [row["prompt"] for row in batch], args)
            answered += grade(batch, completions)
            elapsed = time.monotonic() - began
            line = {
                "step": step,
                "num_steps": len(starts),
                "time_s": elapsed,
                "accuracy": _mean(answered),
                "num_problems": min(start + args.batch_size, len(rows)),
                "completion_tokens": num_tokens / len(batch),
                "memory_peak_gb": memory_peak_gb(),
            }
            append(metrics, line)
            say(progress_line(line, elapsed / step))
            profile.step()
            if stop_asked() and step < len(starts):
                raise Interrupted(accuracy=_mean(answered), num_problems=line["num_problems"])
    say(f"done: {_mean(answered):.1%} of {len(rows)} held-out problems solved")
    return summary(answered, len(rows), time.monotonic() - began) | {"data_sha256": json_sha256(rows)}


@torch.inference_mode()
def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], args: EvaluateConfig) -> tuple[list[str], int]:
    """One completion a prompt (a string, or messages), and how many tokens they have together."""
    rendered = [p if isinstance(p, str) else tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    inputs = tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False).to(model.device)
    # top_k 0 and top_p 1: a model's own generation_config would otherwise cut the distribution without a word.
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {"do_sample": False}
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    with torch.autocast(model.device.type, dtype=dtype, enabled=args.bf16 or args.fp16):
        outputs = model.generate(
            **inputs,
            **sampling,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    generated = outputs[:, inputs["input_ids"].shape[1] :]
    num_tokens = int((generated != tokenizer.pad_token_id).sum())
    return tokenizer.batch_decode(generated, skip_special_tokens=True), num_tokens


def grade(rows: list[Row], completions: list[str]) -> list[Row]:
    """{prompt, completion, answer, correct, task} for each row; only a full score is correct."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    prompts = columns.pop("prompt")
    score = rewards.reasoning_gym if "entry" in columns else rewards.accuracy
    scores = score(prompts, completions, **columns)
    return [
        {"prompt": row["prompt"], "completion": text, "answer": row["answer"], "correct": value == 1.0, "task": row.get("task", "all")}
        for row, text, value in zip(rows, completions, scores, strict=True)
    ]


def summary(answered: list[Row], num_problems: int, elapsed_s: float) -> dict[str, Any]:
    """The content of result.json, without status."""
    tasks: dict[str, list[Row]] = defaultdict(list)
    for row in answered:
        tasks[row["task"]].append(row)
    by_task = {name: {"accuracy": _mean(rows), "num_samples": len(rows)} for name, rows in sorted(tasks.items())}
    samples = [{key: row[key] for key in ("prompt", "completion", "answer", "correct")} for row in answered[:NUM_SAMPLES_SHOWN]]
    return {
        "accuracy": _mean(answered),
        "num_problems": num_problems,
        "time_s": elapsed_s,
        "by_task": by_task,
        "samples": samples,
    }


def _mean(answered: list[Row]) -> float:
    return sum(row["correct"] for row in answered) / len(answered)


if __name__ == "__main__":
    main(evaluate)
