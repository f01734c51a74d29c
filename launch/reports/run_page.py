"""Build the page of one run: status, results, curves, speed, memory and configuration."""

from __future__ import annotations

import datetime
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.core.json_files import is_number
from launch.execution import logs
from launch.execution.meaning import explain
from launch.execution.supervise import failures
from launch.plan.next_steps import command_line
from launch.plan.views import at_steps
from launch.reports import evaluations, key_charts, run_tables
from launch.reports.curves import Charts
from launch.reports.formats import TITLES, duration, mark_of, number, percent, ratio, text
from launch.reports.parts import Block, Cell, Facts, Note, Pre, Section, build_sections, cell, table
from launch.reports.run_files import Run, value_at

MAX_LOG_LINES = 20
TELEMETRY = "Measured on the first rank's GPU; each logged value is a mean since the previous one."


def sections(run: Run, curves: bool = True) -> list[Section]:
    """Return the sections that the run has content for.

    Without `curves`, which another part of the page shows, only telemetry is drawn.
    """
    return build_sections(
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
            "GPU telemetry": lambda: [Charts(key_charts.telemetry(run), TELEMETRY)],
            "Profile": lambda: run_tables.profile(run),
            "What ran": lambda: what_ran(run),
            "Warnings": lambda: map(Note, run.warnings),
            "All other curves": lambda: key_charts.others(run) if curves else [],
            "Configuration": lambda: configuration(run),
        }
    )


def verdict(status: str) -> str:
    return str(TITLES["verdicts"].get(status, f"The status in its record is {status}."))


def headline(status: str, exit_code: Any, figures: Iterable[Sequence[Any]]) -> Block:
    """Return a table of the status and of the main figures: (name, value, note)."""
    code = "" if exit_code is None else f"exit code {exit_code}"
    rows = [("status", Cell(status, mark=mark_of(status)), code), *figures]
    columns = ("figure", "value", "note")
    return table("Main figures", (dict(zip(columns, row, strict=True)) for row in rows))


def summary(run: Run) -> list[Block]:
    """Return the main figures and, if the run did not end well, the reasons."""
    blocks: list[Block] = [headline(run.status, run.exit_code, figures(run))]
    is_below_gate = run.result.get("status") == "done" and bool(run.result.get("below"))
    error = run.result.get("error")
    if run.status != "done" or error:
        sentences = ["Below its gate." if is_below_gate else verdict(run.status)]
        sentences += [f"Exit code {run.exit_code}."] if run.exit_code else []
        sentences += [str(error)] if error else []
        blocks.append(Note(" ".join(sentences), mark_of(run.status)))
    has_started = run.status not in ("waiting", "gone")
    if has_started and not (run.metrics.rows or run_tables.rows_of(run)):
        blocks.append(Note("metrics.jsonl has no lines, so there are no curves.", "warn"))
    blocks += [Note(line, "warn") for line in run.notes]
    if has_started and run.status not in ("done", "running") and not is_below_gate:
        blocks += log_ends(run)
    return blocks


def log_ends(run: Run) -> list[Block]:
    """Return the end of the first failed rank's log, or of all logs if no rank failed."""
    folder, blocks = run.folder / "logs", list[Block]()
    failure = next(iter(failures(run.folder)), None)
    rank_log = folder / f"rank{failure['rank']}.log" if failure else folder
    all_logs = sorted(folder.glob("*.log"))
    # The log of a process group contains the output of its ranks, so skip the logs of ranks.
    group_logs = [file for file in all_logs if not file.stem.startswith("rank")]
    has_log = rank_log.is_file() and rank_log.stat().st_size
    for file in [rank_log] if has_log else group_logs or all_logs:
        tail = logs.tail(file, count=1000)
        lines = tail.lines[-MAX_LOG_LINES:]
        cause = str(failure["error"]) if failure else logs.root_cause(tail.lines) or tail.end_reason
        if lines:
            title = f"Last lines of logs/{file.name}" + (f" ({cause})" if cause else "")
            blocks.append(Pre(title, "\n".join(lines)))
            if meaning := explain([cause or ""], lines):
                blocks.append(Note(f"This usually means: {meaning}"))
    return blocks


def figures(run: Run) -> list[tuple[str, Any, str]]:
    """Return the run's main figures as (name, value, note)."""
    result, rows, last = run.result, run_tables.rows_of(run), run.metrics.last
    figures: list[tuple[str, Any, str]] = []

    def add(name: str, value: Any, note: str = "") -> None:
        if value is not None:
            figures.append((name, value, note))

    if not rows and is_number(last.get("num_steps")):
        add("steps", last["step"], f"of {number(last['num_steps'])}")
    for key in ("loss", "eval_loss", "reward", "accuracy") if not rows else ():
        values = run.metrics.points(key)[1] or [v for v in [result.get(key)] if is_number(v)]
        if values:
            interval = evaluations.interval(result.get("interval"))  # of an evaluation
            format_value = percent if key == "accuracy" or interval else number
            first = f"from {format_value(values[0])}" if len(values) > 1 else ""
            add(key, Cell(format_value(values[-1]), True), interval or first)
    note = "stopped early" if result.get("stopped_early") is True else "on held-out rows"
    add("best step", result.get("best_step"), note)
    speed = run_tables.measured(run, "tokens_per_second")
    predicted = value_at(run.plan, "speed", "tokens_per_second")
    share = ratio(speed, predicted)
    add("tokens/s", speed, f"{share} of {number(predicted)} predicted" if share else "")
    mfu, peak = run_tables.measured(run, "mfu"), run_tables.peak_gb(run)
    add("MFU", mfu and Cell(percent(mfu), True), "of the hardware's peak")
    entry = run_tables.planned_memory(run)
    planned = f"of {number(round(entry['total_gb'], 1))} GB predicted" if entry else ""
    add("peak memory", peak and Cell(f"{number(round(peak, 2))} GB", True), planned)
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
    """Return the seconds from start to end or, if the run has not ended, to its last metrics."""
    if not run.record.get("finished"):
        return run.metrics.last.get("time_s")
    parse = datetime.datetime.fromisoformat
    return (parse(run.record["finished"]) - parse(run.record["started"])).total_seconds()


def results(run: Run) -> list[Block]:
    """Return a table of the values in result.json and their targets, then its texts."""
    targets = run.plan.get("targets") or {}
    values = {key: v for key, v in run.result.items() if key not in TITLES["not_results"]}
    values |= at_steps(targets, run.metrics.rows)
    figures = {k: v for k, v in values.items() if is_number(v) or k in targets}
    missing = Cell("not measured" if run.status == "done" else "not yet")
    rows = []
    for key in dict.fromkeys([*figures, *targets]):
        row = {"figure": key, "result": figures.get(key, missing)}
        if target := targets.get(key):
            share = Cell(ratio(figures.get(key), target["value"]), True)
            row |= {"target": target["value"], "of target": share, "source": target["source"]}
        rows.append(row)
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    return [table("Final figures", rows), Facts(texts)]


def about(run: Run) -> str:
    """Return a line like: grpo of qwen3_4b, bf16, split, on mi300x, commit 66483e3d."""
    method = run.option("method")
    # The composition of a benchmark that uses no model contains one nevertheless.
    model = run.option("model") if run.get("method", "uses_model") is not False else None
    place = run.result.get("device") or run.option("hardware")
    commit = str(value_at(run.record, "code", "commit") or "")[:8]
    parts = (
        f"{method} of {model}" if method and model else method,
        run.get("precision", "name"),
        run.get("topology", "name"),
        place and f"on {place}",
        commit and f"commit {commit}",
    )
    return ", ".join(str(part) for part in parts if part)


def what_ran(run: Run) -> list[Block]:
    """Return the facts about command, hardware, composition, image and code in the run's files."""
    record, runtime = run.record, run.option("runtime")
    gpus = value_at(record, "host", "gpus") or []
    gpu_counts = Counter(f"{gpu.get('product')} ({gpu.get('gfx')})" for gpu in gpus)
    gpu_indices = {gpu for process in run.plan.get("processes") or [] for gpu in process["gpus"]}
    overrides = record.get("overrides")
    no_image = f"none: runtime={runtime}" if runtime and not record.get("image") else None
    files = value_at(record, "data", "files") or {}
    facts = {
        "run": run.folder,
        "command": None if overrides is None else command_line("run", *map(str, overrides)),
        **{key: record.get(key) for key in ("started", "finished", "restarts")},
        "hardware": run.option("hardware"),
        "device": run.result.get("device"),
        "GPUs": [f"{count} {name}" for name, count in gpu_counts.items()],
        "GPUs used": len(gpu_indices) if "processes" in run.plan else None,
        **{name: details(run.get(name), keys) for name, keys in TITLES["composition"].items()},
        **{name: details(record.get(name), keys) for name, keys in TITLES["record"].items()},
        "data files": [f"{Path(file).name} sha256 {sha[:16]}" for file, sha in files.items()],
        "seed": run.get("seed"),
        "composition": record.get("composition_hash"),
    }
    facts["image"] = facts["image"] or no_image
    if run.get("method", "uses_model") is False:
        facts |= dict.fromkeys(("model", "data", "adapter"))
    if run.status == "done":
        facts["reproduce"] = f"python launch/reproduce.py {shlex.quote(str(run.folder))}"
    texts = {key: text(value) for key, value in facts.items() if value not in (None, "", [])}
    return [Facts(texts)]


def details(content: Mapping[str, Any] | None, keys: Sequence[str]) -> str:
    """Return `key value` for each of the keys that is set; for the key `name`, only its value."""
    values = {key: (content or {}).get(key) for key in keys}
    return ", ".join(
        cell(value).text if key == "name" else f"{key} {cell(value).text}"
        for key, value in values.items()
        if value is not None
    )


def configuration(run: Run) -> list[Block]:
    """Return the composition, the trainer's arguments and every process's command, folded."""
    contents = {"Complete configuration": run.config}
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
