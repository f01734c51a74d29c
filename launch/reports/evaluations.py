"""Build blocks of evaluations: accuracy by task and level, pass@k, answers, paired comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch.reports import paired
from launch.reports.parts import (
    TITLES,
    Block,
    Cell,
    Folded,
    Note,
    cell,
    percent,
    percent_cell,
    table,
)
from launch.reports.run_files import Run, dig

SIGNIFICANT = 0.05


def blocks(run: Run) -> list[Block]:
    """Return tables by group and by k, results of lm-evaluation-harness, and some answers."""
    result, tables = run.result, list[Block]()
    shown: dict[str, Callable[[Any], Any]] = {"interval": interval, "accuracy": percent_cell}
    for name in ("by_task", "by_level", "by_task_and_level"):
        caption = name.replace("_", " ").capitalize()
        rows = (
            {caption.removeprefix("By "): str(of)}
            | {
                TITLES["evaluation"].get(key, key): shown.get(key, cell)(value)
                for key, value in group.items()
            }
            for of, group in (result.get(name) or {}).items()
        )
        tables.append(table(caption, rows))
    values = {key: result.get(f"{key}_at_k") or {} for key in ("pass", "maj")}
    rows = (
        {"k": Cell(str(k), True)}
        | {
            title: content
            for key, by_k in values.items()
            for title, content in (
                (f"{key}@k", percent_cell(by_k.get(k))),
                (f"its interval, {key}@k", interval(dig(result, f"{key}_at_k_interval", k))),
            )
        }
        for k in dict.fromkeys([*values["pass"], *values["maj"]])
    )
    note = (
        "pass@k: one of k samples is right (unbiased, arXiv:2107.03374). "
        "maj@k: their most frequent answer is. Intervals are those of 95%."
    )
    tables.append(table("By number of samples", rows, note))
    harness = (
        {"task": task, "metric": name, "value": value}
        for task, figures in (result.get("lm_eval") or {}).items()
        for name, value in figures.items()
    )
    tables.append(table("lm-evaluation-harness", harness))
    samples = result.get("samples") or []
    if not samples:
        return tables
    marks = ["bad" if sample.get("correct") is False else "" for sample in samples]
    wrong = f", {marks.count('bad')} of them wrong" if "bad" in marks else ""
    note = "All are in samples.jsonl." if (run.folder / "samples.jsonl").is_file() else ""
    answers = (
        {"": str(n), **{key: _answer(value) for key, value in sample.items()}}
        for n, sample in enumerate(samples, start=1)
    )
    folded = Folded(f"{len(samples)} answers{wrong}", [table("Answers", answers, note, marks)])
    return [*tables, folded]


def _answer(value: Any) -> Any:
    """Return the text of a conversation, or any other value unchanged."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "\n".join(str(message.get("content", "")) for message in value)
    return value


def with_first(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair the first evaluation with each later one."""
    evaluated = [run for run in runs if _shares(run)]
    return [(evaluated[0], run) for run in evaluated[1:]]


def compared(pairs: Sequence[tuple[Run, Run]]) -> list[Block]:
    """Compare each pair problem by problem; name the pairs whose problems differ."""
    rows, skipped = [], []
    for first, run in pairs:
        before, after = _shares(first), _shares(run)
        if not before or not after:
            continue
        is_same = run.result.get("data_sha256") == first.result.get("data_sha256")
        if not is_same or len(after) != len(before):
            names = f"{first.name} and {run.name}"
            why = "have different problems (data_sha256), so they are not compared."
            skipped.append(Note(f"{names} {why}", "warn"))
            continue
        comparison = paired.compare(before, after)
        is_significant = comparison.p < SIGNIFICANT
        mark = ("good" if comparison.difference > 0 else "bad") if is_significant else ""
        rows.append(
            {
                "runs": f"{first.name} to {run.name}",
                "before": percent_cell(comparison.before),
                "after": percent_cell(comparison.after),
                "points": Cell(f"{100 * comparison.difference:+.1f}", True),
                "95% interval": f"{100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}",
                "better / worse problems": f"{comparison.better} / {comparison.worse} of "
                f"{comparison.num_problems}",
                "p": Cell(f"{comparison.p:.2g}", True, mark),
            }
        )
    note = (
        "p: the chance of a difference at least as large between two equally good models "
        "(exact sign-flip test over the problems; with one sample each it is McNemar's exact "
        f"test). Below {SIGNIFICANT} it is marked."
    )
    return [table("The same problems", rows, note), *skipped]


def _shares(run: Run) -> list[tuple[int, int]]:
    """Return (correct samples, samples) of each problem; [] for an incomplete evaluation."""
    total = run.result.get("samples_per_prompt")
    if not total or not run.result.get("data_sha256"):
        return []
    return [(right, total) for right in run.result.get("right_per_problem") or []]


def interval(ends: Any) -> str:
    """Format an interval of a share, or return nothing if there is none."""
    return f"{percent(ends[0])} to {percent(ends[1])}" if ends else ""
