"""Sample a model, score the samples, and select the best as training rows (rejection sampling).

This is the first half of RAFT (arXiv:2304.06767). The launcher starts this program, one process per
GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=sample model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=sample model=qwen3_4b
    RAFT:    python launch/run.py hardware=mi350x method=raft model=qwen3_4b    (then SFT, repeated)

Prompts are sampled in batches, each with its own seed and file. An interrupted run resumes at
the next batch, and the results do not depend on the number of ranks (recipes/sampling/batches.py).
recipes/sampling/samples.py selects samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.errors import UserError
from launch.core.json_files import sha256
from recipes.data.data_curriculum import check_levels, cycle_shares, read_pass_rates
from recipes.data.data_load import Row, columns, load
from recipes.rank import ranks
from recipes.rank.files import json_sha256
from recipes.rank.program import is_main_rank, main, say
from recipes.rewards.verifier import build_verifier
from recipes.sampling.batches import Log, sample_all, write_rows
from recipes.sampling.generation import SamplingConfig
from recipes.sampling.samples import (
    by_level,
    choose_prompts,
    completion,
    is_correct,
    pass_curve,
    select,
)

SELECTED = "selected.jsonl"
# Has all samples. data=samples makes preference pairs from this file.
SCORED = "scored.jsonl"
NUM_SAMPLES_SHOWN = 8


@dataclass
class SampleConfig(SamplingConfig):
    """Arguments of method=sample. `batch_size` counts prompts.

    `cycle` of `num_cycles` is the position in data.curriculum. Each cycle samples other prompts.
    `reuse` is the directory of a run or pipeline, whose batches with the same hash are reused.
    Raises UserError if that directory does not exist.
    """

    num_prompts: int | None = None
    samples_per_prompt: int = 8
    batch_size: int = 8
    threshold: float = 1.0
    finished_only: bool = True
    deduplicate: bool = True
    per_prompt: int | None = 4
    top_fraction: float = 1.0
    cycle: int = 1
    num_cycles: int = 1
    reuse: str | None = None
    bf16: bool = False
    fp16: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse is not None and not Path(self.reuse).is_dir():
            raise UserError(
                f"method.args.reuse={self.reuse}: no such directory. "
                "Use the directory of a run of method=sample or method=raft."
            )


@dataclass
class RaftConfig:
    """Arguments of method=raft. launch/study/cycles.py makes phases from them.

    Each cycle trains the model of the previous cycle (base=continued) or the original (base=fresh).
    `sample`, `train`, `evaluate` and `start` are arguments of those phases.
    """

    cycles: int = 3
    base: str = "continued"
    learning_rate_decay: float = 0.5
    sample: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)


def sample(config: DictConfig) -> dict[str, Any]:
    args = SampleConfig(**config.trainer_args)
    run_dir = Path(config.run_dir)
    ranks.join()
    rows = prompts(config, args)
    verifier = build_verifier(config, columns(rows), rows)
    log = Log(run_dir, "pass_rate")
    samples, _ = sample_all(config, args, rows, verifier, log, args.reuse)
    return write_results(run_dir, args, rows, samples) | log.times() if is_main_rank() else {}


def prompts(config: DictConfig, args: SampleConfig) -> list[Row]:
    """Return the rows to sample. Raises UserError if data.curriculum cannot use their levels."""
    rows = load(config.data, "grpo").rows.to_list()
    weights = None
    if config.data.curriculum != "none":
        levels = [row.get("level") for row in rows]
        check_levels(config.data.curriculum, levels)
        rates = read_pass_rates(config.data.pass_rates)
        weights = cycle_shares(config.data, sorted(set(levels)), args.cycle, args.num_cycles, rates)
    chosen = choose_prompts(rows, args.num_prompts, weights, args.seed + args.cycle - 1)
    if args.num_prompts and len(chosen) < args.num_prompts:
        say(f"num_prompts={args.num_prompts}: sampling all {len(chosen)} available rows")
    return chosen


def write_results(
    run_dir: Path, args: SampleConfig, rows: list[Row], samples: list[Row]
) -> dict[str, Any]:
    """Write scored.jsonl and selected.jsonl, and return result.json's content.

    Raises UserError if no sample is selected.
    """
    write_rows(run_dir / SCORED, (training_row(rows[s["prompt_index"]], s) for s in samples))
    selected = select(samples, args)
    too_long = sum(s["num_tokens"] == 0 for s in samples)
    errors = sum(s["error"] is not None for s in samples)
    cut_off = sum(not s["finished"] for s in samples) - too_long
    failures = (
        f"{cut_off} reached the length limit, {too_long} have a prompt that fills the model's "
        f"context, and {errors} could not be scored"
    )
    if not selected:
        passing = sum(s["score"] >= args.threshold for s in samples)
        best = max(s["score"] for s in samples)
        raise UserError(
            f"none of {len(samples)} samples is selected: {passing} reach threshold="
            f"{args.threshold:g}, and the best score is {best:g}; {failures}. In method.args (with "
            "method=raft: method.args.sample), use a lower threshold, a larger max_new_tokens or "
            "samples_per_prompt, or finished_only=false. Or use easier prompts or a better model. "
            f"If only the selection changes, method.args.reuse={run_dir} reuses these samples."
        )
    training_rows = [training_row(rows[s["prompt_index"]], s) for s in selected]
    write_rows(run_dir / SELECTED, training_rows)
    pass_rate = sum(map(is_correct, samples)) / len(samples)
    say(
        f"done: {len(selected)} of {len(samples)} samples are in {run_dir / SELECTED}. "
        f"{pass_rate:.1%} are correct, {failures}."
    )
    shown = training_rows[:NUM_SAMPLES_SHOWN]
    return {
        "num_prompts": len(rows),
        "num_samples": len(samples),
        "num_unfinished": sum(not s["finished"] for s in samples),
        "num_too_long": too_long,
        "verifier_errors": errors,
        "num_selected": len(selected),
        "num_prompts_selected": len({s["prompt_index"] for s in selected}),
        "pass_rate": pass_rate,
        "pass_at_k": pass_curve(samples),
        "by_level": by_level(samples, rows),
        "selected": str(run_dir / SELECTED),
        "selected_sha256": sha256(run_dir / SELECTED),
        "data_sha256": json_sha256(rows),
        "samples": [{key: row[key] for key in ("prompt", "completion", "score")} for row in shown],
    }


def training_row(row: Row, sample: Row) -> Row:
    """Return a sample as a row in TRL's prompt-completion format."""
    return {
        "prompt": row["prompt"],
        "completion": completion(row["prompt"], sample["text"]),
        **{name: row[name] for name in ("task", "level", "answer") if name in row},
        **{n: sample[n] for n in ("prompt_index", "sample_index", "score", "finished")},
    }


if __name__ == "__main__":
    main(sample)
