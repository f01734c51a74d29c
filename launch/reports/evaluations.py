"""Build the blocks of an evaluation, and compare evaluations of the same problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch.config.follow_run import HELDOUT_KEYS
from launch.config.request import leaves
from launch.reports import paired
from launch.reports.formats import TITLES, percent, text
from launch.reports.parts import Block, Cell, Folded, Note, cell, percent_cell, table
from launch.reports.run_files import Run, value_at

SIGNIFICANT = 0.05
METHOD_KEYS = ("rewards", "reward_chain", "reward_pattern")
REWARD_UNITS = 100  # of the full reward; the time of the exact test grows with this number
SPEED_ARGS = ("batch_size",)  # arguments of an evaluation that change no answer


def blocks(run: Run) -> list[Block]:
    """Return tables by group and by k, lm-evaluation-harness results, and answers."""
    result, tables = run.result, list[Block]()
    formats: dict[str, Callable[[Any], Any]] = {"interval": interval}
    formats |= dict.fromkeys(("accuracy", "reward"), percent_cell)
    for name in ("by_task", "by_level", "by_task_and_level"):
        caption = name.replace("_", " ").capitalize()
        rows = (
            {caption.removeprefix("By "): str(group)}
            | {
                TITLES["evaluation"].get(key, key): formats.get(key, cell)(value)
                for key, value in figures.items()
            }
            for group, figures in (result.get(name) or {}).items()
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
                (f"{key}@k, 95% interval", interval(value_at(result, f"{key}_at_k_interval", k))),
            )
        }
        for k in dict.fromkeys([*values["pass"], *values["maj"]])
    )
    note = (
        "pass@k: the chance that at least one of k samples is correct (unbiased estimate, "
        "arXiv:2107.03374). maj@k: the chance that the most frequent answer of k is correct."
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
    note = "samples.jsonl has all answers." if (run.folder / "samples.jsonl").is_file() else ""
    answers = (
        {"": str(n), **{key: _without_roles(value) for key, value in sample.items()}}
        for n, sample in enumerate(samples, start=1)
    )
    folded = Folded(f"{len(samples)} answers{wrong}", [table("Answers", answers, note, marks)])
    return [*tables, folded]


def _without_roles(value: Any) -> Any:
    """Return the texts of a list of messages, and any other value unchanged."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "\n".join(str(message.get("content", "")) for message in value)
    return value


def pairs_with_first(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return a pair of the first evaluation and each later one."""
    evaluations = [run for run in runs if _scores(run)]
    return [(evaluations[0], run) for run in evaluations[1:]]


def comparisons(pairs: Sequence[tuple[Run, Run]]) -> list[Block]:
    """Return a table that compares each pair, and a note on each pair that is not alike."""
    rows, notes = [], []
    for first, run in pairs:
        before, after = _scores(first), _scores(run)
        if not before or not after:
            continue
        names = f"{first.name} and {run.name}"
        is_same = run.result.get("data_sha256") == first.result.get("data_sha256")
        is_same &= ("accuracy" in run.result) == ("accuracy" in first.result)
        if not is_same or len(after) != len(before):
            why = "have different problems (data_sha256) or measures, so they are not compared."
            settings = _differing_settings(first, run, (*HELDOUT_KEYS, "limit"))
            differences = f" They differ in {settings}." if settings else ""
            notes.append(Note(f"{names} {why}{differences}", "warn"))
            continue
        if settings := _differing_settings(first, run, ("chat_template",)):
            why = f"differ in {settings}, so the change is not only that of the model."
            notes.append(Note(f"{names} {why}", "warn"))
        comparison = paired.compare(before, after)
        is_significant = comparison.p < SIGNIFICANT
        mark = ("good" if comparison.difference > 0 else "bad") if is_significant else ""
        rows.append(
            {
                "runs": f"{first.name} to {run.name}",
                "before": percent_cell(comparison.before),
                "after": percent_cell(comparison.after),
                "change (points)": Cell(f"{100 * comparison.difference:+.1f}", True),
                "95% interval": f"{100 * comparison.low:+.1f} to {100 * comparison.high:+.1f}",
                "better / worse problems": f"{comparison.better} / {comparison.worse} of "
                f"{comparison.num_problems}",
                "p": Cell(f"{comparison.p:.2g}", True, mark),
            }
        )
    note = (
        "p: the chance of a difference at least as large between two equally good models. It is "
        "computed by the exact sign-flip test over the problems, which is McNemar's exact test if "
        f"each problem has one sample. Values below {SIGNIFICANT} are marked. Rewards are in "
        "percent of the full reward."
    )
    return [table("Comparison on the same problems", rows, note), *notes]


def _differing_settings(first: Run, run: Run, data_keys: Sequence[str]) -> str:
    """Return the settings that differ, other than the model, and affect which answers count."""
    contents: list[dict[str, Any]] = []
    for config in (first.config, run.config):
        method, data = (config.get(group) or {} for group in ("method", "data"))
        args = {k: v for k, v in (method.get("args") or {}).items() if k not in SPEED_ARGS}
        content = {"method": {**{key: method.get(key) for key in METHOD_KEYS}, "args": args}}
        content |= {"data": {key: data.get(key) for key in data_keys}}
        contents.append(leaves("", content))
    before, after = contents
    return ", ".join(
        f"{key} ({text(before.get(key))} and {text(after.get(key))})"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    )


def _scores(run: Run) -> list[tuple[int, int]]:
    """Return (correct samples, samples) of each problem, or its mean reward as a fraction.

    [] for an incomplete evaluation.
    """
    total = run.result.get("samples_per_prompt")
    if not total or not run.result.get("data_sha256"):
        return []
    if rewards := run.result.get("reward_per_problem"):
        return [(round(REWARD_UNITS * reward), REWARD_UNITS) for reward in rewards]
    return [(correct, total) for correct in run.result.get("right_per_problem") or []]


def interval(ends: Any) -> str:
    """Format the ends of an interval in percent; return '' if there is no interval."""
    return f"{percent(ends[0])} to {percent(ends[1])}" if ends else ""
