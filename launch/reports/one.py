"""Build the page of one run: how it ended, what it was, what it reached, its speed and memory."""

from __future__ import annotations

import datetime
import json
import shlex
from pathlib import Path
from typing import Any

from launch.reports import evaluations, rows, series, tables
from launch.reports.curves import Charts
from launch.reports.data import Run, dig, is_number, last_words, listed, mapping, objects
from launch.reports.parts import (
    Block,
    Cell,
    Facts,
    Figure,
    Figures,
    Folded,
    Note,
    Notes,
    Pre,
    Section,
    Table,
    duration,
    filled,
    mark_of,
    number,
    number_cell,
    percent,
    ratio,
    status_figure,
    text,
)
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
PACKAGES = ("torch", "transformers", "trl", "vllm", "accelerate", "deepspeed", "peft", "triton")
# Keys of a result.json that are not figures of the run, or that other sections show.
NOT_RESULTS = {"status", "exit_code", "error", "columns", "rows", "notes", "below", "before",
               "after", "overrides", "samples", "by_task", "fail_below", "gain", "benchmark",
               "figure", "device", "tuning", "experiment"}  # fmt: skip
# The values of a record's host, with the words before each.
HOST = {
    "hostname": "",
    "kernel": "Linux ",
    "num_cores": "cores: ",
    "rocm": "ROCm ",
    "amdgpu_driver": "amdgpu ",
    "nvidia_driver": "NVIDIA driver ",
}


def sections(run: Run, curves: bool = True) -> list[Section]:
    """Return the sections that the run can fill. `curves` is false if other charts show them."""
    return filled(
        {
            "Summary": summary(run),
            "Benchmark": tables.benchmark(run),
            "Tuning": tables.tuning(run),
            "Results": results(run),
            "Rows": rows.section(run),
            "Evaluation": evaluations.blocks(run),
            "Curves": [Charts(series.main(run))] if curves else [],
            "Speed": tables.speed(run),
            "Memory": tables.memory(run),
            "GPU telemetry": telemetry(run, curves),
            "Profile": tables.profile(run),
            "What ran": what_ran(run),
            "Warnings": [Notes(run.warnings)],
            "All other curves": other_curves(run) if curves else [],
            "Configuration": configuration(run),
        }
    )


def verdict(status: str) -> str:
    return VERDICTS.get(status, f"Its record says {status}.")


def summary(run: Run) -> list[Block]:
    blocks: list[Block] = [Figures(figures(run))]
    is_below = run.result.get("status") == "done" and bool(run.result.get("below"))
    is_gate = run.status == "failed" and is_below
    error = run.result.get("error")
    if run.status != "done" or error:
        sentences = ["Below its gate." if is_gate else verdict(run.status)]
        sentences += [f"Exit code {run.exit_code}."] if run.exit_code else []
        sentences += [str(error)] if error else []
        blocks.append(Note(" ".join(sentences), mark_of(run.status)))
    if not run.metrics.rows and run.status not in ("waiting", "gone") and not tables.rows_of(run):
        blocks.append(Note("metrics.jsonl has no lines, so there are no curves.", "warn"))
    blocks += [Note(line, "warn") for line in run.notes]
    if run.status not in ("done", "running", "waiting", "gone") and not is_gate:
        for words in last_words(run):
            why = f": {words.why}" if words.why else ""
            title = f"Last lines of {words.log} ({words.process}{why})"
            blocks.append(Pre(title, "\n".join(words.lines)))
            if words.meaning:
                blocks.append(Note(f"This usually means: {words.meaning}"))
    return blocks


def figures(run: Run) -> list[Figure]:
    """Return the headline numbers: progress, loss, accuracy, speed, memory, time, energy."""
    result, rows = run.result, tables.rows_of(run)
    figures = [status_figure(run.status, run.exit_code)]
    figures += [] if rows else _progress(run)
    if is_number(result.get("best_step")):
        why = "stopped early" if result.get("stopped_early") is True else "by held-out rows"
        figures.append(Figure("best step", number(result["best_step"]), why))
    figures += _speed(run)
    if rows:
        failed = sum(1 for row in rows if row.get("error"))
        under, mark = (f"{failed} failed", "warn") if failed else ("", "")
        figures += [*_best_row(run), Figure("rows", number(len(rows)), under, mark)]
    if is_number(result.get("fail_below")):
        below = result.get("below") or []
        value, mark = (f"{len(below)} below", "bad") if below else ("passed", "good")
        figures.append(Figure("gate", value, f"{percent(result['fail_below'])} of published", mark))
    if is_number(result.get("gain")):
        figures.append(Figure("gain", f"{result['gain']:.3g}×", "after over before"))
    if (seconds := elapsed_s(run)) is not None:
        under = "from start to end" if run.record.get("finished") else "so far"
        figures.append(Figure("time", duration(seconds), under))
    if is_number(energy := result.get("energy_kwh_per_million_tokens")):
        figures.append(Figure("energy", number(energy), "kWh per million tokens"))
    return figures


def _progress(run: Run) -> list[Figure]:
    figures, last = [], run.metrics.last
    if is_number(last.get("num_steps")):
        figures.append(Figure("steps", number(last["step"]), f"of {number(last['num_steps'])}"))
    for key in ("loss", "reward", "accuracy"):
        values = run.metrics.points(key)[1] or [v for v in [run.result.get(key)] if is_number(v)]
        if values:
            shown = percent if key == "accuracy" else number
            interval = evaluations.interval(run) if key == "accuracy" else ""
            under = interval or (f"from {shown(values[0])}" if len(values) > 1 else "")
            figures.append(Figure(key, shown(values[-1]), under))
    return figures


def _best_row(run: Run) -> list[Figure]:
    """Return the best row by the figure that the benchmark or tuning compares rows by."""
    key = str(run.result.get("figure"))
    values = [row[key] for row in tables.rows_of(run) if is_number(row.get(key))]
    if not values:
        return []
    titles = {column["key"]: tables.title_of(column) for column in tables.columns_of(run)}
    best = min if run.result.get("higher_is_better") is False else max
    return [Figure(titles.get(key, key), number(best(values)), "the best row")]


def _speed(run: Run) -> list[Figure]:
    figures = []
    if (speed := tables.measured(run, "tokens_per_second")) is not None:
        predicted = dig(run.plan, "speed", "tokens_per_second")
        share = ratio(speed, predicted)
        under = f"{share} of {number(predicted)} predicted" if share else ""
        figures.append(Figure("tokens/s", number(speed), under))
    if (mfu := tables.measured(run, "mfu")) is not None:
        figures.append(Figure("MFU", percent(mfu), "of the hardware's peak"))
    if (peak := tables.peak_gb(run)) is not None:
        entry = tables.planned_memory(run)
        under = f"of {number(round(entry['total_gb'], 1))} GB predicted" if entry else ""
        figures.append(Figure("memory, most", f"{number(round(peak, 2))} GB", under))
    return figures


def elapsed_s(run: Run) -> float | None:
    """Return the time from the record's start to its end; without an end, to the last line."""
    try:
        started, finished = (
            datetime.datetime.fromisoformat(str(run.record[key])) for key in ("started", "finished")
        )
        return (finished - started).total_seconds()
    except (KeyError, ValueError, TypeError):  # the run has not ended
        seconds = run.metrics.last.get("time_s")
        return float(seconds) if is_number(seconds) else None


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
            target, goal = mapping(targets.get(key)), dig(targets, key, "value")
            share = number_cell(ratio(reached.get(key), goal))
            rows[-1] += [goal if target else "", share, str(target.get("source", ""))]
    columns = ["figure", "result"]
    columns += ["target", "of target", "source of the target"] if targets else []
    words = {key: value for key, value in values.items() if isinstance(value, str)}
    return [Table("Final figures", columns, rows), Facts(words)]


def telemetry(run: Run, curves: bool) -> list[Block]:
    charts = series.telemetry(run)
    note = "Means between two logged lines, of the GPU of the first rank."
    if curves:
        return [Charts(charts, note)]
    rows = [[chart.title, number_cell(series.mean_of(chart))] for chart in charts]
    return [Table("GPU telemetry, means of the run", ["counter", "mean"], rows, note=note)]


def other_curves(run: Run) -> list[Block]:
    charts, constant = series.others(run)
    values = ", ".join(f"{key} {number(value)}" for key, value in constant.items())
    note = f"Not drawn, because every line has the same value: {values}." if constant else ""
    if charts:
        return [Folded(f"{len(charts)} curve(s)", [Charts(charts, note)])]
    return [Note(note)] if note else []


def about(run: Run) -> str:
    """Return a line about what ran: grpo of qwen3_4b, bf16, split on mi300x, commit 66483e3d."""
    method = run.named("method")
    # A benchmark that reads no model still has one in its composition.
    model = run.named("model") if run.get("method", "uses_model") is not False else None
    place = run.result.get("device") or run.named("hardware")
    commit = str(dig(run.record, "code", "commit") or "")[:8]
    return _joined(
        f"{method} of {model}" if method and model else method,
        run.get("precision", "name"),
        run.get("topology", "name"),
        place and f"on {place}",
        commit and f"commit {commit}",
    )


def _joined(*parts: Any, separator: str = ", ") -> str:
    return separator.join(str(part) for part in parts if part)


def _values(content: Any, words: dict[str, str]) -> str:
    """Join the values that are present, each with its words before it."""
    return _joined(*(f"{before}{v}" for key, before in words.items() if (v := dig(content, key))))


def what_ran(run: Run) -> list[Block]:
    """Return hardware, image, model, method, code and command, as far as the run's files say."""
    record, runtime, overrides = run.record, run.named("runtime"), run.record.get("overrides")
    image = record.get("image") or run.plan.get("image") or {}
    no_image = f"none: runtime={runtime}" if runtime else ""
    topology = (run.named("topology"), run.get("topology", "strategy"))
    commit, is_dirty = (dig(record, "code", key) for key in ("commit", "dirty"))
    changes = ", with uncommitted changes" if is_dirty else ""
    facts = {
        "run": run.folder,
        "command": "" if overrides is None else typed([str(o) for o in overrides]),
        "started": record.get("started"),
        "finished": record.get("finished"),
        "restarts": record.get("restarts") or None,
        "hardware": _hardware(run),
        "host": _values(record.get("host"), HOST),
        "image": _image(image) if image else no_image,
        "packages": _values(record.get("packages"), {name: f"{name} " for name in PACKAGES}),
        "model": _model(run),
        "method": run.named("method"),
        "data": _data(run),
        "precision": run.named("precision"),
        "adapter": run.named("adapter"),
        "topology": _joined(*(name for name in topology if name != "none")),
        "seed": run.get("seed"),
        "code": f"commit {commit}{changes}" if commit else "",
        "composition": record.get("composition_hash"),
    }
    if run.get("method", "uses_model") is False:
        facts |= dict.fromkeys(("model", "data", "adapter"), "")
    known = {key: str(value) for key, value in facts.items() if value not in (None, "")}
    again = f"python launch/reproduce.py {shlex.quote(str(run.folder))}"
    return [Facts(known), Facts({"reproduce": again} if run.status == "done" else {}, code=True)]


def _hardware(run: Run) -> str:
    gpus = objects(dig(run.record, "host", "gpus"))
    products = dict.fromkeys(f"{gpu.get('product')} ({gpu.get('gfx')})" for gpu in gpus)
    processes = objects(run.plan.get("processes"))
    used = {str(gpu) for process in processes for gpu in listed(process.get("gpus"))}
    no_gpu = "no GPU used" if "processes" in run.plan else ""
    return _joined(
        run.named("hardware"),
        run.result.get("device"),
        gpus and f"{len(gpus)} GPU(s) present: {', '.join(products)}",
        f"{len(used)} used" if used else no_gpu,
        separator="; ",
    )


def _image(image: dict[str, Any]) -> str:
    base = image.get("base")
    base = base.get("name") if isinstance(base, dict) else base
    return _joined(
        text(image.get("reference") or image.get("name")),
        image.get("id") and f"id {image['id']}",
        base and f"built on {base}",
    ) + ("" if image.get("verified", True) else " (unverified: named by a tag)")


def _model(run: Run) -> str:
    size, revision = run.get("model", "num_parameters"), run.get("model", "revision")
    is_random = run.get("model", "init") == "random"
    return _joined(
        run.named("model"),
        f"{number(size)} parameters" if is_number(size) else "",
        run.get("model", "path") or ("random weights" if is_random else run.get("model", "hub_id")),
        revision and f"revision {revision}",
    )


def _data(run: Run) -> str:
    kind = run.get("data", "kind")
    tasks = objects(run.get("data", "tasks")) if kind in ("reasoning", "code") else []
    digests = mapping(dig(run.record, "data", "files"))
    return _joined(
        kind,
        run.get("data", "path") or run.get("data", "hub_id"),
        *(task.get("name") for task in tasks),
        *(f"{Path(file).name} sha256 {str(digest)[:16]}" for file, digest in digests.items()),
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
    for process in objects(run.plan.get("processes")):
        env = "\n".join(f"{key}={value}" for key, value in mapping(process.get("env")).items())
        argv = shlex.join(map(str, listed(process.get("argv"))))
        texts[f"Process {process.get('name')}: command and environment"] = f"{argv}\n\n{env}"
    return [Pre(title, text, folded=True) for title, text in texts.items()]
