"""Build the page of one run: how it ended, its configuration, results, speed and memory."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch.execution import logs
from launch.execution.meaning import of as meaning_of
from launch.execution.supervise import failures
from launch.reports import evaluations, key_charts, run_tables, trained_rows
from launch.reports.curves import Charts
from launch.reports.parts import (
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
    text,
)
from launch.reports.run_files import Run, dig, is_number
from launch.study.pool import typed

VERDICTS = {
    "done": "Done.",
    "running": "Still running: this page shows its state so far. The same command updates it.",
    "lost": "Its record says running, but no launcher on this machine holds it. "
    "It was killed, or it runs on another machine.",
    "interrupted": "Interrupted. The command that started it resumes it.",
    "failed": "Failed.",
    "hung": "Hung, and was stopped.",
    "waiting": "Not started.",
    "unknown": "There is no record of how it ended.",
    "gone": "It was reused from an earlier run, which has been deleted.",
}
LAST_LINES = 20
# Keys of a result.json that are not figures of the run, or that other sections show.
NOT_RESULTS = {"status", "exit_code", "error", "columns", "rows", "notes", "below", "before",
               "after", "overrides", "samples", "by_task", "fail_below", "gain", "benchmark",
               "figure", "device", "tuning", "experiment"}  # fmt: skip
# What a run was, as the keys of its composition or record that tell it.
GROUPS = {
    "model": "name num_parameters path hub_id revision init",
    "method": "name",
    "data": "name kind path hub_id",
    "precision": "name",
    "adapter": "name",
    "topology": "name strategy",
}
RECORDED = {
    "host": "hostname kernel num_cores rocm amdgpu_driver nvidia_driver",
    "image": "name reference id base verified",
    "packages": "torch transformers trl vllm accelerate deepspeed peft triton",
    "code": "commit dirty",
}


def sections(run: Run, curves: bool = True) -> list[Section]:
    """Return the sections that the run can fill. `curves` is false if other charts show them."""
    return filled(
        {
            "Summary": lambda: summary(run),
            "Benchmark": lambda: run_tables.benchmark(run),
            "Tuning": lambda: run_tables.tuning(run),
            "Results": lambda: results(run),
            "Rows": lambda: trained_rows.section(run),
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
    return VERDICTS.get(status, f"Its record says {status}.")


def headline(status: str, exit_code: Any, figures: Iterable[list[Any]]) -> Table:
    """Return the table of the figures that matter most, after the status."""
    code = "" if exit_code is None else f"exit code {exit_code}"
    first = ["status", Cell(status, mark=mark_of(status)), code]
    return Table("Main figures", ["figure", "value", "note"], [first, *figures])


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
        words = logs.last_words(file, count=1000)
        lines = words.lines[-LAST_LINES:]
        why = str(first["error"]) if first else logs.root_cause(words.lines)
        if why is None and words.exit_code is not None:
            code = words.exit_code
            why = logs.killed_by(-code) if code < 0 else f"exit code {code}"
        if lines:
            title = f"Last lines of logs/{file.name}" + (f" ({why})" if why else "")
            blocks.append(Pre(title, "\n".join(lines)))
            if meaning := meaning_of([why or ""]) or meaning_of(lines):
                blocks.append(Note(f"This usually means: {meaning}"))
    return blocks


def figures(run: Run) -> list[list[Any]]:
    """Return the headline numbers: progress, loss, accuracy, speed, memory, time, energy."""
    result, rows, last, figures = run.result, run_tables.rows_of(run), run.metrics.last, []
    if not rows and is_number(last.get("num_steps")):
        figures.append(["steps", last["step"], f"of {number(last['num_steps'])}"])
    for key in ("loss", "reward", "accuracy") if not rows else ():
        values = run.metrics.points(key)[1] or [v for v in [result.get(key)] if is_number(v)]
        if values:
            shown = percent if key == "accuracy" else number
            interval = evaluations.interval(result.get("interval")) if key == "accuracy" else ""
            under = interval or (f"from {shown(values[0])}" if len(values) > 1 else "")
            figures.append([key, Cell(shown(values[-1]), True), under])
    if is_number(result.get("best_step")):
        why = "stopped early" if result.get("stopped_early") is True else "by held-out rows"
        figures.append(["best step", result["best_step"], why])
    if (speed := run_tables.measured(run, "tokens_per_second")) is not None:
        predicted = dig(run.plan, "speed", "tokens_per_second")
        share = ratio(speed, predicted)
        under = f"{share} of {number(predicted)} predicted" if share else ""
        figures.append(["tokens/s", speed, under])
    if (mfu := run_tables.measured(run, "mfu")) is not None:
        figures.append(["MFU", Cell(percent(mfu), True), "of the hardware's peak"])
    if (peak := run_tables.peak_gb(run)) is not None:
        entry = run_tables.planned_memory(run)
        under = f"of {number(round(entry['total_gb'], 1))} GB predicted" if entry else ""
        figures.append(["memory, most", Cell(f"{number(round(peak, 2))} GB", True), under])
    key = str(result.get("figure"))
    if values := [row[key] for row in rows if is_number(row.get(key))]:
        titles = {
            column["key"]: run_tables.title_of(column) for column in run_tables.columns_of(run)
        }
        best = min if result.get("higher_is_better") is False else max
        figures.append([titles.get(key, key), best(values), "the best row"])
    if rows:
        failed = sum(1 for row in rows if row.get("error"))
        figures.append(["rows", len(rows), f"{failed} failed" if failed else ""])
    if is_number(gate := result.get("fail_below")):
        below = result.get("below") or []
        verdict = Cell(f"{len(below)} below", mark="bad") if below else Cell("passed", mark="good")
        figures.append(["gate", verdict, f"{percent(gate)} of published"])
    if is_number(gain := result.get("gain")):
        figures.append(["gain", Cell(f"{gain:.3g}×", True), "after over before"])
    if (seconds := elapsed_s(run)) is not None:
        under = "from start to end" if run.record.get("finished") else "so far"
        figures.append(["time", Cell(duration(seconds), True), under])
    if is_number(energy := result.get("energy_kwh_per_million_tokens")):
        figures.append(["energy", energy, "kWh per million tokens"])
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
    values = {key: value for key, value in run.result.items() if key not in NOT_RESULTS}
    reached = {k: v for k, v in values.items() if is_number(v) or k in targets}
    missing = Cell("not reached" if run.status == "done" else "not yet")
    rows = []
    for key in dict.fromkeys([*reached, *targets]):
        rows.append([key, reached.get(key, missing)])
        if targets:
            target = targets.get(key) or {}
            share = Cell(ratio(reached.get(key), target.get("value")), True)
            rows[-1] += [target.get("value", ""), share, target.get("source", "")]
    columns = ["figure", "result"]
    columns += ["target", "of target", "source of the target"] if targets else []
    words = {key: value for key, value in values.items() if isinstance(value, str)}
    return [Table("Final figures", columns, rows), Facts(words)]


def telemetry(run: Run, curves: bool) -> list[Block]:
    charts = key_charts.telemetry(run)
    note = "Means between two logged lines, of the GPU of the first rank."
    if curves:
        return [Charts(charts, note)]
    rows = [
        [chart.title, statistics.fmean(chart.curves[0].points[1]), chart.unit] for chart in charts
    ]
    return [Table("GPU telemetry, means of the run", ["counter", "mean", "unit"], rows, note=note)]


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
    used = {gpu for process in run.plan.get("processes") or [] for gpu in process["gpus"]}
    overrides = record.get("overrides")
    image = f"none: runtime={runtime}" if runtime and not record.get("image") else None
    files = dig(record, "data", "files") or {}
    facts = {
        "run": run.folder,
        "command": None if overrides is None else typed([str(o) for o in overrides]),
        **{key: record.get(key) for key in ("started", "finished", "restarts")},
        "hardware": run.named("hardware"),
        "device": run.result.get("device"),
        "GPUs": [f"{count} {name}" for name, count in present.items()],
        "GPUs used": len(used) if "processes" in run.plan else None,
        **{group: details(run.get(group), keys) for group, keys in GROUPS.items()},
        **{key: details(record.get(key), keys) for key, keys in RECORDED.items()},
        "data files": [f"{Path(file).name} sha256 {sha[:16]}" for file, sha in files.items()],
        "seed": run.get("seed"),
        "composition": record.get("composition_hash"),
    }
    facts["image"] = facts["image"] or image
    if run.get("method", "uses_model") is False:
        facts |= dict.fromkeys(("model", "data", "adapter"))
    if run.status == "done":
        facts["reproduce"] = f"python launch/reproduce.py {shlex.quote(str(run.folder))}"
    known = {key: text(value) for key, value in facts.items() if value not in (None, "", [])}
    return [Facts(known)]


def details(content: Mapping[str, Any] | None, keys: str) -> str:
    """Return the values of these keys that are set, each after its key; the name stands alone."""
    values = {key: (content or {}).get(key) for key in keys.split()}
    return ", ".join(
        cell(value).text if key == "name" else f"{key} {cell(value).text}"
        for key, value in values.items()
        if value is not None
    )


def configuration(run: Run) -> list[Block]:
    """Return the whole configuration and every process's command, folded."""
    contents = {
        "The whole configuration": run.config,
        "Arguments of the trainer": run.plan.get("trainer_args"),
    }
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
