"""Build blocks of evaluations: accuracy by task and level, pass@k, answers, paired comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch.reports import paired
from launch.reports.parts import Block, Cell, Folded, Note, Table, cell, percent, percent_cell
from launch.reports.run_files import Run, dig

GROUPS = {"by_task": "By task", "by_level": "By level", "by_task_and_level": "By task and level"}
TITLES = {"interval": "95% interval", "num_problems": "problems", "num_samples": "samples"}
SIGNIFICANT = 0.05


def blocks(run: Run) -> list[Block]:
    """Return tables by group and by k, results of lm-evaluation-harness, and some answers."""
    result, tables = run.result, list[Block]()
    shown: dict[str, Callable[[Any], Any]] = {"interval": interval, "accuracy": percent_cell}
    for name, caption in GROUPS.items():
        groups = result.get(name) or {}
        keys = list(dict.fromkeys(key for group in groups.values() for key in group))
        columns = [caption.removeprefix("By "), *(TITLES.get(key, key) for key in keys)]
        rows: list[list[Any]] = [
            [str(of), *(shown.get(key, cell)(group.get(key)) for key in keys)]
            for of, group in groups.items()
        ]
        tables.append(Table(caption, columns, rows))
    values = {key: result.get(key) or {} for key in ("pass_at_k", "maj_at_k")}
    rows = [
        [Cell(str(k), True)]
        + [
            column
            for key, by_k in values.items()
            for column in (percent_cell(by_k.get(k)), interval(dig(result, f"{key}_interval", k)))
        ]
        for k in dict.fromkeys([*values["pass_at_k"], *values["maj_at_k"]])
    ]
    note = (
        "pass@k: one of k samples is right (unbiased, arXiv:2107.03374). "
        "maj@k: their most frequent answer is."
    )
    columns = ["k", "pass@k", "95% interval", "maj@k", "95% interval"]
    tables.append(Table("By number of samples", columns, rows, note=note))
    harness = [
        [task, name, value]
        for task, figures in (result.get("lm_eval") or {}).items()
        for name, value in figures.items()
    ]
    tables.append(Table("lm-evaluation-harness", ["task", "metric", "value"], harness))
    samples = result.get("samples") or []
    if not samples:
        return tables
    keys = list(dict.fromkeys(key for sample in samples for key in sample))
    rows = [
        [str(n), *(_answer(sample.get(key)) for key in keys)]
        for n, sample in enumerate(samples, start=1)
    ]
    marks = ["bad" if sample.get("correct") is False else "" for sample in samples]
    wrong = f", {marks.count('bad')} of them wrong" if "bad" in marks else ""
    note = "All are in samples.jsonl." if (run.folder / "samples.jsonl").is_file() else ""
    table = Table("Answers", ["", *keys], rows, marks, note=note)
    return [*tables, Folded(f"{len(samples)} answers{wrong}", [table])]


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
            why = "were asked different problems (data_sha256), so they are not compared."
            skipped.append(Note(f"{names} {why}", "warn"))
            continue
        comparison = paired.compare(before, after)
        is_significant = comparison.p < SIGNIFICANT
        mark = ("good" if comparison.difference > 0 else "bad") if is_significant else ""
        rows.append(
            [
                f"{first.name} to {run.name}",
                percent_cell(comparison.before),
                percent_cell(comparison.after),
                Cell(f"{100 * comparison.difference:+.1f}", True),
                f"{100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}",
                f"{comparison.better} / {comparison.worse} of {comparison.num_problems}",
                Cell(f"{comparison.p:.2g}", True, mark),
            ]
        )
    columns = ["runs", "before", "after", "points", "95% interval", "better / worse problems", "p"]
    note = (
        "p: the chance of a difference at least as large between two equally good models "
        "(exact sign-flip test over the problems; with one sample a problem it is McNemar's exact "
        f"test). Below {SIGNIFICANT} it is marked."
    )
    return [Table("The same problems", columns, rows, note=note), *skipped]


def _shares(run: Run) -> list[tuple[int, int]]:
    """Return (correct samples, samples) of each problem; [] for an incomplete evaluation."""
    total = run.result.get("samples_per_prompt")
    if not total or not run.result.get("data_sha256"):
        return []
    return [(right, total) for right in run.result.get("right_per_problem") or []]


def interval(ends: Any) -> str:
    """Format an interval of a share, or return nothing if there is none."""
    return f"{percent(ends[0])} to {percent(ends[1])}" if ends else ""
