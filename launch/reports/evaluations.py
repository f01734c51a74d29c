"""What a page says of evaluations: accuracy by task and level, pass@k, answers, and two of them on the same problems compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.reports import paired
from launch.reports.data import Run, dig, is_number, listed, objects
from launch.reports.parts import Cell, Folded, Note, Table, cell, percent

GROUPS = {"by_task": "By task", "by_level": "By level", "by_task_and_level": "By task and level"}
SIGNIFICANT = 0.05


def blocks(run: Run) -> list[Any]:
    """Of one run: tables of its groups and of k, what lm-evaluation-harness found, and some answers, failures first."""
    found: list[Any] = []
    for key, caption in GROUPS.items():
        groups = {name: group for name, group in (run.result.get(key) or {}).items() if isinstance(group, dict)}
        if groups:
            keys = list(dict.fromkeys(k for group in groups.values() for k in group))
            rows = [[Cell(str(name)), *(_shown(k, group.get(k)) for k in keys)] for name, group in groups.items()]
            found.append(Table(caption, [caption.removeprefix("By "), *map(_title, keys)], rows))
    found += _by_k(run)
    harness = run.result.get("lm_eval") or {}
    rows = [[Cell(str(task)), Cell(str(name)), cell(value)] for task, values in harness.items() if isinstance(values, dict)
            for name, value in values.items()]  # fmt: skip
    found += [Table("lm-evaluation-harness", ["task", "metric", "value"], rows)] if rows else []
    samples = objects(run.result.get("samples"))
    if samples:
        keys = list(dict.fromkeys(key for sample in samples for key in sample))
        rows = [[Cell(str(n)), *(cell(_text(sample.get(key))) for key in keys)] for n, sample in enumerate(samples, start=1)]
        marks = ["bad" if sample.get("correct") is False else "" for sample in samples]
        wrong = f", {marks.count('bad')} of them wrong" if "bad" in marks else ""
        found.append(Folded(f"{len(samples)} answers{wrong}", [Table("Answers", ["", *keys], rows, marks, note=_where(run))]))
    return found


def with_first(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The first evaluation with each later one."""
    evaluated = [run for run in runs if _shares(run)]
    return [(evaluated[0], run) for run in evaluated[1:]]


def compared(pairs: Sequence[tuple[Run, Run]]) -> list[Any]:
    """The second of each pair beside the first, problem by problem; those of other problems are named, and not compared."""
    rows, refused = [], []
    for first, run in pairs:
        before, after = _shares(first), _shares(run)
        if not before or not after:
            continue
        if run.result.get("data_sha256") != first.result.get("data_sha256") or len(after) != len(before):
            refused.append(Note(f"{first.name} and {run.name} were asked different problems (data_sha256): they are not compared.", "warn"))
            continue
        found = paired.compare(before, after)
        mark = "" if found.p >= SIGNIFICANT else "good" if found.difference > 0 else "bad"
        values = [percent(found.before), percent(found.after), f"{100 * found.difference:+.1f}"]
        rows.append(
            [
                Cell(f"{first.name} to {run.name}"),
                *(Cell(value, number=True) for value in values),
                Cell(f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"),
                Cell(f"{found.better} / {found.worse} of {found.num_problems}"),
                Cell(f"{found.p:.2g}", number=True, mark=mark),
            ]
        )
    columns = ["runs", "before", "after", "points", "95% interval", "better / worse problems", "p"]
    note = (
        "p: the chance of a difference at least as large between two equally good models (exact sign-flip test over the problems; with one "
        f"sample a problem it is McNemar's exact test). Below {SIGNIFICANT} it is marked."
    )
    return [*([Table("The same problems", columns, rows, note=note)] if rows else []), *refused]


def interval(run: Run) -> str:
    """The interval of a run's accuracy; empty where it has none."""
    return _range(run.result.get("interval"))


def _shares(run: Run) -> list[tuple[int, int]]:
    """Of each problem how many samples were right, of how many; empty where the run is no whole evaluation."""
    right, total = listed(run.result.get("right_per_problem")), run.result.get("samples_per_prompt")
    whole = isinstance(total, int) and total > 0 and all(isinstance(n, int) and 0 <= n <= total for n in right)
    return [(n, total) for n in right] if whole and run.result.get("data_sha256") else []  # type: ignore[misc]


def _by_k(run: Run) -> list[Any]:
    names = [name for name in ("pass_at_k", "maj_at_k") if isinstance(run.result.get(name), dict)]
    if not names:
        return []
    rows = []
    for k in dict.fromkeys(k for name in names for k in run.result[name]):
        cells = [(_percent(run.result[name].get(k)), Cell(_range(dig(run.result, f"{name}_interval", k)))) for name in names]
        rows.append([Cell(str(k), number=True), *(each for pair in cells for each in pair)])
    titles = {"pass_at_k": "pass@k", "maj_at_k": "maj@k"}
    note = "pass@k: one of k samples is right (unbiased, arXiv:2107.03374). maj@k: their most frequent answer is."
    return [Table("By number of samples", ["k", *(t for name in names for t in (titles[name], "95% interval"))], rows, note=note)]


def _title(key: str) -> str:
    return {"interval": "95% interval", "num_problems": "problems", "num_samples": "samples"}.get(key, key)


def _shown(key: str, value: Any) -> Cell:
    if key == "interval":
        return Cell(_range(value))
    return _percent(value) if key == "accuracy" else cell(value)


def _percent(value: Any) -> Cell:
    return Cell(percent(value), number=True) if is_number(value) else cell(None)


def _range(value: Any) -> str:
    ends = listed(value)
    return f"{percent(ends[0])} to {percent(ends[1])}" if len(ends) == 2 and all(map(is_number, ends)) else ""


def _text(value: Any) -> Any:
    """Messages as what they say."""
    messages = objects(value) if isinstance(value, list) else []
    return "\n".join(str(message.get("content", "")) for message in messages) if messages else value


def _where(run: Run) -> str:
    return "All are in samples.jsonl." if (run.folder / "samples.jsonl").is_file() else ""
