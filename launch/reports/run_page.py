"""Build the page of one run: how it ended, its configuration, results, speed and memory."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.execution import logs
from launch.execution.meaning import explain
from launch.execution.supervise import failures
from launch.reports import evaluations, key_charts, run_tables
from launch.reports.curves import Charts
from launch.reports.parts import (
    TITLES,
    Block,
    Cell,
    Facts,
    Note,
    Pre,
    Section,
    Table,
    cell,
    duration,
    filled,
    mark_of,
    number,
    percent,
    ratio,
    table,
    text,
)
from launch.reports.run_files import Run, dig, is_number
from launch.study.trials import command_line

LAST_LINES = 20


def sections(run: Run, curves: bool = True) -> list[Section]:
    """Return the sections that the run can fill. `curves` is false if other charts show them."""
    return filled(
        {
            "Summary": lambda: summary(run),
            "Benchmark": lambda: run_tables.benchmark(run),
            "Tuning": lambda: run_tables.tuning(run),
            "Results": lambda: results(run),
            "Rows": lambda: run_tables.data_rows(run),
            "Evaluation": lambda: evaluations.blocks(run),
            "Curves": lambda: [Charts(key_charts.main(run))] if curves else [],
            "Speed": lambda: run_tables.speed(run),
            "Memory": lambda: run_tables.memory(run),
            "GPU telemetry": lambda: telemetry(run, curves),
            "Profile": lambda: run_tables.profile(run),
            "What ran": lambda: what_ran(run),
            "Warnings": lambda: map(Note, run.warnings),
            "All other curves": lambda: key_charts.others(run) if curves else [],
            "Configuration": lambda: configuration(run),
        }
    )


def verdict(status: str) -> str:
    return str(TITLES["verdicts"].get(status, f"Its record says {status}."))


def headline(status: str, exit_code: Any, figures: Iterable[Sequence[Any]]) -> Table:
    """Return the table of the figures that matter most (name, value, note), after the status."""
    code = "" if exit_code is None else f"exit code {exit_code}"
    rows = [("status", Cell(status, mark=mark_of(status)), code), *figures]
    columns = ("figure", "value", "note")
    return table("Main figures", (dict(zip(columns, row, strict=True)) for row in rows))


def summary(run: Run) -> list[Block]:
    blocks: list[Block] = [headline(run.status, run.exit_code, figures(run))]
    is_gate = run.result.get("status") == "done" and bool(run.result.get("below"))
    error = run.result.get("error")
    if run.status != "done" or error:
        sentences = ["Below its gate." if is_gate else verdict(run.status)]
        sentences += [f"Exit code {run.exit_code}."] if run.exit_code else []
        sentences += [str(error)] if error else []
        blocks.append(Note(" ".join(sentences), mark_of(run.status)))
    if (
        not run.metrics.rows
        and run.status not in ("waiting", "gone")
        and not run_tables.rows_of(run)
    ):
        blocks.append(Note("metrics.jsonl has no lines, so there are no curves.", "warn"))
    blocks += [Note(line, "warn") for line in run.notes]
    if run.status not in ("done", "running", "waiting", "gone") and not is_gate:
        blocks += last_words(run)
    return blocks


def last_words(run: Run) -> list[Block]:
    """Show the end of the first failed rank's log, or of all process groups' logs without one."""
    folder, blocks = run.folder / "logs", list[Block]()
    first = next(iter(failures(run.folder)), None)
    own = folder / f"rank{first['rank']}.log" if first else folder
    # The log of a process group repeats the output of its ranks.
    every = sorted(folder.glob("*.log"))
    groups = [file for file in every if not file.stem.startswith("rank")]
    files = [own] if own.is_file() and own.stat().st_size else groups or every
    for file in files:
        words = logs.tail(file, count=1000)
        lines = words.lines[-LAST_LINES:]
        why = str(first["error"]) if first else logs.root_cause(words.lines) or words.end_reason
        if lines:
            title = f"Last lines of logs/{file.name}" + (f" ({why})" if why else "")
            blocks.append(Pre(title, "\n".join(lines)))
            if meaning := explain([why or ""], lines):
                blocks.append(Note(f"This usually means: {meaning}"))
    return blocks


def figures(run: Run) -> list[tuple[str, Any, str]]:
    """Return the headline numbers: progress, loss, accuracy, speed, memory, rows, time, energy."""
    result, rows, last = run.result, run_tables.rows_of(run), run.metrics.last
    figures: list[tuple[str, Any, str]] = []

    def add(name: str, value: Any, note: str = "") -> None:
        if value is not None:
            figures.append((name, value, note))

    if not rows and is_number(last.get("num_steps")):
        add("steps", last["step"], f"of {number(last['num_steps'])}")
    for key in ("loss", "reward", "accuracy") if not rows else ():
        values = run.metrics.points(key)[1] or [v for v in [result.get(key)] if is_number(v)]
        if values:
            shown = percent if key == "accuracy" else number
            interval = evaluations.interval(result.get("interval")) if key == "accuracy" else ""
            first = f"from {shown(values[0])}" if len(values) > 1 else ""
            add(key, Cell(shown(values[-1]), True), interval or first)
    why = "stopped early" if result.get("stopped_early") is True else "by held-out rows"
    add("best step", result.get("best_step"), why)
    speed = run_tables.measured(run, "tokens_per_second")
    predicted = dig(run.plan, "speed", "tokens_per_second")
    share = ratio(speed, predicted)
    add("tokens/s", speed, f"{share} of {number(predicted)} predicted" if share else "")
    mfu, peak = run_tables.measured(run, "mfu"), run_tables.peak_gb(run)
    add("MFU", mfu and Cell(percent(mfu), True), "of the hardware's peak")
    entry = run_tables.planned_memory(run)
    planned = f"of {number(round(entry['total_gb'], 1))} GB predicted" if entry else ""
    add("memory, most", peak and Cell(f"{number(round(peak, 2))} GB", True), planned)
    if rows:
        failed = sum(1 for row in rows if row.get("error"))
        add("rows", len(rows), f"{failed} failed" if failed else "")
    if is_number(gate := result.get("fail_below")):
        below = result.get("below")
        passed = Cell(f"{len(below)} below", mark="bad") if below else Cell("passed", mark="good")
        add("gate", passed, f"{percent(gate)} of published")
    seconds = elapsed_s(run)
    end = "from start to end" if run.record.get("finished") else "so far"
    add("time", None if seconds is None else Cell(duration(seconds), True), end)
    add("energy", result.get("energy_kwh_per_million_tokens"), "kWh per million tokens")
    return figures


def elapsed_s(run: Run) -> float | None:
    """Return the time from the record's start to its end; without an end, to the last line."""
    if not run.record.get("finished"):
        return run.metrics.last.get("time_s")
    started, finished = (
        datetime.datetime.fromisoformat(run.record[key]) for key in ("started", "finished")
    )
    return (finished - started).total_seconds()


def results(run: Run) -> list[Block]:
    """Return the figures of result.json, next to their targets."""
    targets = run.plan.get("targets") or {}
    values = {key: v for key, v in run.result.items() if key not in TITLES["not_results"]}
    reached = {k: v for k, v in values.items() if is_number(v) or k in targets}
    missing = Cell("not reached" if run.status == "done" else "not yet")
    rows = []
    for key in dict.fromkeys([*reached, *targets]):
        row = {"figure": key, "result": reached.get(key, missing)}
        if target := targets.get(key):
            share = Cell(ratio(reached.get(key), target["value"]), True)
            row |= {"target": target["value"], "of target": share, "source": target["source"]}
        rows.append(row)
    words = {key: value for key, value in values.items() if isinstance(value, str)}
    return [table("Final figures", rows), Facts(words)]


def telemetry(run: Run, curves: bool) -> list[Block]:
    charts = key_charts.telemetry(run)
    note = "Means between two logged lines, of the GPU of the first rank."
    if curves:
        return [Charts(charts, note)]
    rows = (
        {"counter": chart.title, "mean": statistics.fmean(chart.curves[0].points[1])}
        | {"unit": chart.unit}
        for chart in charts
    )
    return [table("GPU telemetry, means of the run", rows, note)]


def about(run: Run) -> str:
    """Return a line about what ran: grpo of qwen3_4b, bf16, split on mi300x, commit 66483e3d."""
    method = run.named("method")
    # A benchmark that reads no model still has one in its composition.
    model = run.named("model") if run.get("method", "uses_model") is not False else None
    place = run.result.get("device") or run.named("hardware")
    commit = str(dig(run.record, "code", "commit") or "")[:8]
    parts = (
        f"{method} of {model}" if method and model else method,
        run.get("precision", "name"),
        run.get("topology", "name"),
        place and f"on {place}",
        commit and f"commit {commit}",
    )
    return ", ".join(str(part) for part in parts if part)


def what_ran(run: Run) -> list[Block]:
    """Return hardware, image, model, method, code and command, as far as the run's files say."""
    record, runtime = run.record, run.named("runtime")
    gpus = dig(record, "host", "gpus") or []
    present = Counter(f"{gpu.get('product')} ({gpu.get('gfx')})" for gpu in gpus)
    gpu_indices = {gpu for process in run.plan.get("processes") or [] for gpu in process["gpus"]}
    overrides = record.get("overrides")
    image = f"none: runtime={runtime}" if runtime and not record.get("image") else None
    files = dig(record, "data", "files") or {}
    facts = {
        "run": run.folder,
        "command": None if overrides is None else command_line([str(o) for o in overrides]),
        **{key: record.get(key) for key in ("started", "finished", "restarts")},
        "hardware": run.named("hardware"),
        "device": run.result.get("device"),
        "GPUs": [f"{count} {name}" for name, count in present.items()],
        "GPUs used": len(gpu_indices) if "processes" in run.plan else None,
        **{name: details(run.get(name), keys) for name, keys in TITLES["composition"].items()},
        **{name: details(record.get(name), keys) for name, keys in TITLES["record"].items()},
        "data files": [f"{Path(file).name} sha256 {sha[:16]}" for file, sha in files.items()],
        "seed": run.get("seed"),
        "composition": record.get("composition_hash"),
    }
    facts["image"] = facts["image"] or image
    if run.get("method", "uses_model") is False:
        facts |= dict.fromkeys(("model", "data", "adapter"))
    if run.status == "done":
        facts["reproduce"] = f"python launch/reproduce.py {shlex.quote(str(run.folder))}"
    texts = {key: text(value) for key, value in facts.items() if value not in (None, "", [])}
    return [Facts(texts)]


def details(content: Mapping[str, Any] | None, keys: Sequence[str]) -> str:
    """Return the values of these keys that are set, each after its key; the name stands alone."""
    values = {key: (content or {}).get(key) for key in keys}
    return ", ".join(
        cell(value).text if key == "name" else f"{key} {cell(value).text}"
        for key, value in values.items()
        if value is not None
    )


def configuration(run: Run) -> list[Block]:
    """Return the whole configuration and every process's command, folded."""
    contents = {"The whole configuration": run.config}
    contents |= {"Arguments of the trainer": run.plan.get("trainer_args") or {}}
    texts = {
        title: json.dumps(content, indent=1, ensure_ascii=False)
        for title, content in contents.items()
        if content
    }
    for process in run.plan.get("processes") or []:
        env = "\n".join(f"{key}={value}" for key, value in process["env"].items())
        title = f"Process {process['name']}: command and environment"
        texts[title] = f"{shlex.join(process['argv'])}\n\n{env}"
    return [Pre(title, text, folded=True) for title, text in texts.items()]
