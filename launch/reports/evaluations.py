"""Build blocks of evaluations: accuracy by task and level, pass@k, answers, paired comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.reports import paired
from launch.reports.data import Run, dig, is_number, listed, mapping, objects
from launch.reports.parts import (
    Block,
    Cell,
    Folded,
    Note,
    Table,
    cell,
    number_cell,
    percent,
    percent_cell,
)

GROUPS = {"by_task": "By task", "by_level": "By level", "by_task_and_level": "By task and level"}
TITLES = {"interval": "95% interval", "num_problems": "problems", "num_samples": "samples"}
SIGNIFICANT = 0.05


def blocks(run: Run) -> list[Block]:
    """Return tables by group and by k, results of lm-evaluation-harness, and some answers."""
    tables = [_by_group(run, key, caption) for key, caption in GROUPS.items()]
    harness = [
        [str(task), str(name), value]
        for task, values in mapping(run.result.get("lm_eval")).items()
        for name, value in mapping(values).items()
    ]
    tables += [_by_k(run), Table("lm-evaluation-harness", ["task", "metric", "value"], harness)]
    return [*tables, *_answers(run)]


def _by_group(run: Run, key: str, caption: str) -> Table:
    groups = {k: v for k, v in mapping(run.result.get(key)).items() if isinstance(v, dict)}
    keys = list(dict.fromkeys(k for group in groups.values() for k in group))
    columns = [caption.removeprefix("By "), *(TITLES.get(k, k) for k in keys)]
    shown = {"interval": _range, "accuracy": percent_cell}
    rows = [
        [str(name), *(shown.get(k, cell)(group.get(k)) for k in keys)]
        for name, group in groups.items()
    ]
    return Table(caption, columns, rows)


def _by_k(run: Run) -> Table:
    titles = {"pass_at_k": "pass@k", "maj_at_k": "maj@k"}
    values = {key: run.result[key] for key in titles if isinstance(run.result.get(key), dict)}
    rows = []
    for k in dict.fromkeys(k for by_k in values.values() for k in by_k):
        rows.append([number_cell(str(k))])
        for key, by_k in values.items():
            interval = _range(dig(run.result, f"{key}_interval", k))
            rows[-1] += [percent_cell(by_k.get(k)), Cell(interval)]
    columns = [title for key in values for title in (titles[key], "95% interval")]
    note = (
        "pass@k: one of k samples is right (unbiased, arXiv:2107.03374). "
        "maj@k: their most frequent answer is."
    )
    return Table("By number of samples", ["k", *columns], rows, note=note)


def _answers(run: Run) -> list[Block]:
    samples = objects(run.result.get("samples"))
    if not samples:
        return []
    keys = list(dict.fromkeys(key for sample in samples for key in sample))
    rows: list[list[Any]] = []
    for n, sample in enumerate(samples, start=1):
        rows.append([str(n)])
        for value in map(sample.get, keys):
            messages = [str(message.get("content", "")) for message in objects(value)]
            rows[-1].append("\n".join(messages) or value)
    marks = ["bad" if sample.get("correct") is False else "" for sample in samples]
    wrong = f", {marks.count('bad')} of them wrong" if "bad" in marks else ""
    note = "All are in samples.jsonl." if (run.folder / "samples.jsonl").is_file() else ""
    table = Table("Answers", ["", *keys], rows, marks, note=note)
    return [Folded(f"{len(samples)} answers{wrong}", [table])]


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
                number_cell(f"{100 * comparison.difference:+.1f}"),
                f"{100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}",
                f"{comparison.better} / {comparison.worse} of {comparison.num_problems}",
                number_cell(f"{comparison.p:.2g}", mark),
            ]
        )
    columns = ["runs", "before", "after", "points", "95% interval", "better / worse problems", "p"]
    note = (
        "p: the chance of a difference at least as large between two equally good models "
        "(exact sign-flip test over the problems; with one sample a problem it is McNemar's exact "
        f"test). Below {SIGNIFICANT} it is marked."
    )
    return [Table("The same problems", columns, rows, note=note), *skipped]


def interval(run: Run) -> str:
    """Return the interval of a run's accuracy, or nothing."""
    return _range(run.result.get("interval"))


def _shares(run: Run) -> list[tuple[int, int]]:
    """Return (correct samples, samples) of each problem; [] for an incomplete evaluation."""
    right, total = listed(run.result.get("right_per_problem")), run.result.get("samples_per_prompt")
    if not isinstance(total, int) or total < 1 or not run.result.get("data_sha256"):
        return []
    is_whole = all(isinstance(n, int) and 0 <= n <= total for n in right)
    return [(n, total) for n in right] if is_whole else []


def _range(value: Any) -> str:
    ends = listed(value)
    if len(ends) != 2 or not all(map(is_number, ends)):
        return ""
    return f"{percent(ends[0])} to {percent(ends[1])}"
