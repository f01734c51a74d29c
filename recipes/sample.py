"""Samples of a model, a verdict on each, and the best of them as training rows: rejection sampling, RAFT's first half (arXiv:2304.06767).

Started by the launcher, one process a GPU:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=sample model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=sample model=qwen3_4b
    RAFT:    python launch/run.py hardware=mi350x method=raft model=qwen3_4b        (cycles of this, SFT and evaluation)

Prompts go in batches that follow from the composition, each with a seed from the hash of all that decides what is sampled. A batch is
one file, whole or not there, so a run that was stopped or killed goes on at the next one and ends with the same rows; ranks take
batches in turn, and how many there are changes nothing (recipes/common/batches.py). What becomes of a sample: recipes/common/samples.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipes.common import ranks
from recipes.common.batches import Log, sample_all, write_rows
from recipes.common.data import Row, load_train
from recipes.common.data_curriculum import check_levels, cycle_shares, read_pass_rates
from recipes.common.data_files import check_tests
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, sha256
from recipes.common.generation import Sampling
from recipes.common.program import is_main_rank, main, say
from recipes.common.samples import Selection, by_level, choose_prompts, is_correct, pass_curve, select
from recipes.common.verify import build_verifier

SELECTED = "selected.jsonl"
SCORED = "scored.jsonl"  # all samples as rows, those that are not kept too: data=samples makes preference pairs of them
NUM_SAMPLES_SHOWN = 8


@dataclass
class SampleConfig:
    """Arguments of method=sample. `batch_size` counts prompts, each of `samples_per_prompt` completions. Raises UserError.

    `cycle` of `num_cycles` is where data.curriculum stands, and each draws other prompts; `reuse` is a run, or a pipeline of runs, whose
    batches of the same hash are taken.
    """

    output_dir: str
    seed: int = 0
    engine: str = "transformers"
    num_prompts: int | None = None
    samples_per_prompt: int = 8
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    threshold: float = 1.0
    finished_only: bool = True
    deduplicate: bool = True
    per_prompt: int | None = 4
    top_fraction: float = 1.0
    cycle: int = 1
    num_cycles: int = 1
    reuse: str | None = None
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "samples_per_prompt", "batch_size", "per_prompt", "cycle", "num_cycles"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UserError(f"method.args.{name}={given}: it must be at least 1.")
        if self.cycle > self.num_cycles:
            raise UserError(f"method.args.cycle={self.cycle}: it is one of method.args.num_cycles={self.num_cycles}.")
        if self.reuse is not None and not Path(self.reuse).is_dir():
            raise UserError(f"method.args.reuse={self.reuse}: no such directory. Give a run of method=sample, or a run of method=raft.")
        if not 0 < self.top_fraction <= 1:
            raise UserError(f"method.args.top_fraction={self.top_fraction}: it must be above 0 and at most 1 (1 keeps all).")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    @property
    def selection(self) -> Selection:
        return Selection(self.threshold, self.finished_only, self.deduplicate, self.per_prompt, self.top_fraction)


@dataclass
class RaftConfig:
    """Arguments of method=raft, which launch/pipelines/cycles.py makes phases of.

    `base`: continued or fresh, what each cycle's training starts from.
    `sample`, `train`, `evaluate` and `start` hold arguments of those phases.
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
    verifier = build_verifier(config, [name for name in rows[0] if name != "prompt"])  # refuses rewards that cannot be imported
    check_tests(config, rows)
    log = Log(run_dir, "pass_rate")
    samples, _ = sample_all(config, args, rows, verifier, log, args.reuse)
    return finish(run_dir, args, rows, samples) | log.times() if is_main_rank() else {}


def prompts(config: DictConfig, args: SampleConfig) -> list[Row]:
    """The rows whose prompts this run samples. Raises UserError for levels or pass rates that data.curriculum cannot use."""
    rows = load_train(config.data, "grpo").to_list()
    weights = None
    if config.data.curriculum != "none":
        levels = [row.get("level") for row in rows]
        check_levels(config.data.curriculum, levels)
        rates = read_pass_rates(config.data.pass_rates)
        weights = cycle_shares(config.data, sorted(set(levels)), args.cycle, args.num_cycles, rates)
    chosen = choose_prompts(rows, args.num_prompts, weights, args.seed + args.cycle - 1)
    if args.num_prompts and len(chosen) < args.num_prompts:
        say(f"num_prompts={args.num_prompts}: of the rows to choose from there are {len(chosen)}, and all are sampled")
    return chosen


def finish(run_dir: Path, args: SampleConfig, rows: list[Row], samples: list[Row]) -> dict[str, Any]:
    """Write scored.jsonl and selected.jsonl; the content of result.json. Raises UserError where nothing is kept."""
    write_rows(run_dir / SCORED, (training_row(rows[s["prompt_index"]], s) for s in samples))
    selected = select(samples, args.selection)
    if not selected:
        raise UserError(nothing_kept(run_dir, args, samples))
    kept = [training_row(rows[s["prompt_index"]], s) for s in selected]
    write_rows(run_dir / SELECTED, kept)
    passed = sum(map(is_correct, samples))
    too_long, errors = sum(s["num_tokens"] == 0 for s in samples), sum(s["error"] is not None for s in samples)
    curve = pass_curve(samples)
    say(f"done: {len(kept)} of {len(samples)} samples kept, {passed / len(samples):.1%} pass, in {run_dir / SELECTED}")
    for what, number in (("their prompt fills the model's context", too_long), ("could not be judged", errors)):
        if number:
            say(f"{number} of {len(samples)} samples: {what}; they count as wrong")
    shown = [{"prompt": row["prompt"], "completion": row["completion"], "score": row["score"]} for row in kept[:NUM_SAMPLES_SHOWN]]
    return {
        "num_prompts": len(rows),
        "num_samples": len(samples),
        "num_unfinished": sum(not s["finished"] for s in samples),
        "num_too_long": too_long,
        "verifier_errors": errors,
        "num_selected": len(kept),
        "num_prompts_selected": len({s["prompt_index"] for s in selected}),
        "pass_rate": passed / len(samples),
        "pass_at_k": curve,
        "by_level": by_level(samples, rows),
        "selected": str(run_dir / SELECTED),
        "selected_sha256": sha256(run_dir / SELECTED),
        "data_sha256": json_sha256(rows),
        "samples": shown,
    }


def training_row(row: Row, chosen: Row) -> Row:
    """A row of TRL's prompt-completion format, which SFT trains on the completion of; where it is not `finished`, without its end."""
    text = chosen["text"]
    completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
    about = {name: row[name] for name in ("task", "level", "answer") if name in row}
    return {
        "prompt": row["prompt"],
        "completion": completion,
        **about,
        **{n: chosen[n] for n in ("prompt_index", "sample_index", "score", "finished")},
    }


def nothing_kept(run_dir: Path, args: SampleConfig, samples: list[Row]) -> str:
    """Why no sample was kept, and what to loosen."""
    scores = sorted({round(s["score"], 4) for s in samples}, reverse=True)[:3]
    passed = sum(s["score"] >= args.threshold for s in samples)
    too_long = sum(s["num_tokens"] == 0 for s in samples)
    cut = sum(not s["finished"] for s in samples) - too_long
    errors = sum(s["error"] is not None for s in samples)
    loosen = []
    if passed == 0 and scores[0] > 0:
        loosen.append(f"threshold={scores[0]:g} or less")
    if cut:
        loosen.append(f"max_new_tokens above {args.max_new_tokens}" + (", or finished_only=false" if passed else ""))
    if passed == 0:
        loosen += [
            f"samples_per_prompt above {args.samples_per_prompt}",
            "another temperature",
            "easier prompts",
            "a better model to start from",
        ]
    if too_long:
        loosen.append("shorter prompts, or a model of more positions")
    said = f"{passed} reach threshold={args.threshold:g}, {cut} are cut off at max_new_tokens={args.max_new_tokens}"
    said += f", {errors} could not be judged" * bool(errors) + f", {too_long} are of prompts that fill the model's context" * bool(too_long)
    return (
        f"none of {len(samples)} samples is kept: {said}; best scores: "
        f"{', '.join(f'{score:g}' for score in scores)}. Use: {'; '.join(loosen)} (of method.args; under method=raft, of "
        f"method.args.sample). reuse={run_dir} takes what was sampled again, where it stays the same."
    )


if __name__ == "__main__":
    main(sample)
