"""What a page says of one run: how it ended, what it was, what it reached, how fast, in how much memory."""

from __future__ import annotations

import datetime
import json
import shlex
from pathlib import Path
from typing import Any

from launch.reports import evaluations, series, tables
from launch.reports import rows as data_rows
from launch.reports.curves import Charts
from launch.reports.data import Run, dig, is_number, last_words, listed, objects, table
from launch.reports.parts import (
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
    cell,
    duration,
    number,
    percent,
    text,
)
from launch.sweeps.pool import typed

VERDICTS = {
    "done": "Done.",
    "running": "Still running: this page shows what there was when it was made. The same command makes it anew.",
    "lost": "Its record says running, and no launcher on this machine holds it: it was killed, or it runs on another machine.",
    "interrupted": "Interrupted. The command that started it goes on where it was.",
    "failed": "Failed.",
    "hung": "Hung, and was stopped.",
    "waiting": "Not begun.",
    "unknown": "There is no record of how it ended.",
    "gone": "It was kept of an earlier run, and is not there any more.",
}
PACKAGES = ("torch", "transformers", "trl", "vllm", "accelerate", "deepspeed", "peft", "triton")
# Keys of a result.json that a page shows elsewhere, or that are no figures of the run.
NOT_RESULTS = {
    "status",
    "exit_code",
    "error",
    "columns",
    "rows",
    "notes",
    "below",
    "before",
    "after",
    "overrides",
    "samples",
    "by_task",
    "fail_below",
    "gain",
}
SHOWN_ELSEWHERE = {"benchmark", "figure", "device", "tuning", "experiment"}


def sections(run: Run, curves: bool = True) -> list[Section]:
    """Every section that the run has something for. `curves` false: they stand elsewhere on the page."""
    found = [
        Section("Summary", summary(run)),
        Section("Benchmark", tables.benchmark(run)),
        Section("Tuning", tables.tuning(run)),
        Section("Results", results(run)),
        Section("Rows", data_rows.section(run)),
        Section("Evaluation", evaluations.blocks(run)),
        Section("Curves", [Charts(main)] if curves and (main := series.main(run)) else []),
        Section("Speed", tables.speed(run)),
        Section("Memory", tables.memory(run)),
        Section("GPU telemetry", telemetry(run, curves)),
        Section("Profile", tables.profile(run)),
        Section("What ran", what_ran(run)),
        Section("Warnings", [Notes(warnings)] if (warnings := [*run.notes, *map(text, run.plan.get("warnings") or [])]) else []),
        Section("All other curves", other_curves(run) if curves else []),
        Section("Configuration", configuration(run)),
    ]
    return [section for section in found if section.blocks]


def summary(run: Run) -> list[Any]:
    blocks: list[Any] = [Figures(figures(run))]
    is_gate = run.status == "failed" and run.result.get("status") == "done" and bool(run.result.get("below"))
    verdict, error = "Below its gate." if is_gate else VERDICTS.get(run.status, f"Its record says {run.status}."), run.result.get("error")
    code = f" Exit code {run.exit_code}." if run.exit_code else ""
    if run.status != "done" or error:
        blocks.append(Note(verdict + code + (f" {error}" if error else ""), mark_of(run.status)))
    if not run.metrics.rows and run.status not in ("waiting", "gone") and not tables.rows_of(run):
        blocks.append(Note("metrics.jsonl holds no line, so there are no curves.", "warn"))
    blocks += [Note(line, "warn") for line in run.notes]
    if run.status not in ("done", "running", "waiting", "gone") and not is_gate:
        for words in last_words(run):
            why = f": {words.why}" if words.why else ""
            meaning = [Note(f"This usually means: {words.meaning}")] if words.meaning else []
            blocks += [Pre(f"Last lines of {words.log} ({words.process}{why})", "\n".join(words.lines)), *meaning]
    return blocks


def mark_of(status: str) -> str:
    return {"done": "good", "running": "", "waiting": "", "interrupted": "warn", "unknown": "warn", "gone": "warn"}.get(status, "bad")


def figures(run: Run) -> list[Figure]:
    """What is read first: progress, loss, reward, accuracy, speed, MFU, memory, time, energy; of a benchmark its rows."""
    found = [Figure("status", run.status, f"exit code {run.exit_code}" if run.exit_code is not None else "", mark_of(run.status))]
    last, rows = run.metrics.last, tables.rows_of(run)
    if is_number(last.get("num_steps")) and not rows:
        found.append(Figure("steps", number(last["step"]), f"of {number(last['num_steps'])}"))
    for key in () if rows else ("loss", "reward", "accuracy"):
        values = run.metrics.points(key)[1] or [v for v in [run.result.get(key)] if is_number(v)]
        if values:
            shown = percent if key == "accuracy" else number
            under = f"from {shown(values[0])}" if len(values) > 1 else ""
            found.append(Figure(key, shown(values[-1]), (key == "accuracy" and evaluations.interval(run)) or under))
    if is_number(run.result.get("best_step")):
        why = "stopped early" if run.result.get("stopped_early") is True else "by held-out rows"
        found.append(Figure("best step", number(run.result["best_step"]), why))
    found += speed_figures(run)
    if rows:
        found += best_row(run)
        failed = sum(1 for row in rows if row.get("error"))
        found.append(Figure("rows", number(len(rows)), f"{failed} failed" if failed else "", "warn" if failed else ""))
    if is_number(run.result.get("fail_below")):
        below = run.result.get("below") or []
        share = percent(run.result["fail_below"])
        found.append(Figure("gate", f"{len(below)} below" if below else "passed", f"{share} of published", "bad" if below else "good"))
    if is_number(run.result.get("gain")):
        found.append(Figure("gain", f"{run.result['gain']:.3g}×", "after over before"))
    seconds = elapsed_s(run)
    if seconds is not None:
        found.append(Figure("time", duration(seconds), "with its start and end" if run.record.get("finished") else "so far"))
    if is_number(energy := run.result.get("energy_kwh_per_million_tokens")):
        found.append(Figure("energy", number(energy), "kWh per million tokens"))
    return found


def best_row(run: Run) -> list[Figure]:
    """By the figure that a benchmark or a tuning compares its rows by."""
    values = [row[key] for row in tables.rows_of(run) if is_number(row.get(key := str(run.result.get("figure"))))]
    if not values:
        return []
    title = next((tables.title_of(column) for column in tables.columns_of(run) if column["key"] == key), key)
    return [Figure(title, number((min if run.result.get("higher_is_better") is False else max)(values)), "the best row")]


def speed_figures(run: Run) -> list[Figure]:
    found = []
    measured = tables.measured(run, "tokens_per_second")
    if measured is not None:
        predicted = dig(run.plan, "speed", "tokens_per_second")
        under = f"{percent(measured / predicted)} of {number(predicted)} predicted" if is_number(predicted) and predicted else ""
        found.append(Figure("tokens/s", number(measured), under))
    if (mfu := tables.measured(run, "mfu")) is not None:
        found.append(Figure("MFU", percent(mfu), "of the hardware's peak"))
    if (peak := tables.peak_gb(run)) is not None:
        entry = tables.planned_memory(run)
        under = f"of {number(round(entry['total_gb'], 1))} GB predicted" if entry else ""
        found.append(Figure("memory, most", f"{number(round(peak, 2))} GB", under))
    return found


def elapsed_s(run: Run) -> float | None:
    """From the start to the end that the record has; of a run without an end, by its last line."""
    try:
        started, finished = (datetime.datetime.fromisoformat(str(run.record[key])) for key in ("started", "finished"))
        return (finished - started).total_seconds()
    except (KeyError, ValueError, TypeError):  # the record of a run that goes on has no end
        found = run.metrics.last.get("time_s")
        return float(found) if is_number(found) else None


def results(run: Run) -> list[Any]:
    """Figures of result.json with targets beside them."""
    targets = run.plan.get("targets") or {}
    numbers = {k: v for k, v in run.result.items() if k not in NOT_RESULTS and (is_number(v) or k in targets)}
    rows = [[Cell(key), cell(value), *_target(targets.get(key), value)] for key, value in numbers.items()]
    absent = Cell("not reached" if run.status == "done" else "not yet")
    rows += [[Cell(key), absent, *_target(target, None)] for key, target in targets.items() if key not in numbers]
    columns = ["figure", "result", "target", "of target", "source of the target"] if targets else ["figure", "result"]
    blocks: list[Any] = [Table("Figures of the end", columns, [row[: len(columns)] for row in rows])] if rows else []
    words = {k: v for k, v in run.result.items() if k not in NOT_RESULTS and k not in SHOWN_ELSEWHERE and isinstance(v, str)}
    blocks += [Facts(words)] if words else []
    return blocks


def _target(target: Any, value: Any) -> list[Cell]:
    if not isinstance(target, dict):
        return [Cell(""), Cell(""), Cell("")]
    wanted = target.get("value")
    share = value / wanted if is_number(value) and is_number(wanted) and wanted else None
    return [cell(wanted), Cell("" if share is None else percent(share), number=share is not None), Cell(str(target.get("source", "")))]


def telemetry(run: Run, curves: bool) -> list[Any]:
    charts = series.telemetry(run)
    if not charts:
        return []
    note = "Means between two logged lines, of the GPU of the first rank."
    if curves:
        return [Charts(charts, note)]
    rows = [[Cell(chart.title), Cell(series.mean_of(chart), number=True)] for chart in charts]
    return [Table("GPU telemetry, means of the run", ["counter", "mean"], rows, note=note)]


def other_curves(run: Run) -> list[Any]:
    charts, constant = series.others(run)
    said = ", ".join(f"{key} {number(value)}" for key, value in constant.items())
    note = f"The same in every line, and not drawn: {said}." if constant else ""
    if not charts:
        return [Note(note)] if note else []
    return [Folded(f"{len(charts)} curve(s)", [Charts(charts, note)])]


def about(run: Run) -> str:
    """What ran, in a line: grpo of qwen3_4b, bf16, split on mi300x, commit 66483e3d."""
    method, model = run.get("method", "name") or run.plan.get("method"), _model_name(run)
    around = [run.get("precision", "name"), run.get("topology", "name")]
    place = run.result.get("device") or run.get("hardware", "name") or run.plan.get("hardware")
    commit = str(dig(run.record, "code", "commit") or "")[:8]
    parts = [
        f"{method} of {model}" if method and model else method,
        *around,
        f"on {place}" if place else None,
        commit and f"commit {commit}",
    ]
    return ", ".join(str(part) for part in parts if part)


def _model_name(run: Run) -> str | None:
    """None of a benchmark that reads no model: the one of its composition did not run."""
    return None if run.get("method", "uses_model") is False else run.get("model", "name") or run.plan.get("model")


def what_ran(run: Run) -> list[Any]:
    """Hardware, image, model, method, code, command: each as far as the run's files say it."""
    image = run.record.get("image") or run.plan.get("image") or {}
    runtime = run.get("runtime", "name") or run.plan.get("runtime")
    uses_model = run.get("method", "uses_model") is not False
    topology = {"topology": run.get("topology", "name") or run.plan.get("topology"), "strategy": run.get("topology", "strategy")}
    facts = {
        "run": str(run.folder),
        "command": typed([str(o) for o in run.record.get("overrides") or []]) if "overrides" in run.record else None,
        "started": run.record.get("started"),
        "finished": run.record.get("finished"),
        "restarts": run.record.get("restarts") or None,
        "hardware": _hardware(run),
        "host": _host(run),
        "image": _image(image) if image else (f"none: runtime={runtime}" if runtime else None),
        "packages": _packages(run) or None,
        "model": _model(run) if uses_model else None,
        "method": run.get("method", "name") or run.plan.get("method"),
        "data": _data(run) if uses_model else None,
        "precision": run.get("precision", "name") or run.plan.get("precision"),
        "adapter": (run.get("adapter", "name") or run.plan.get("adapter")) if uses_model else None,
        "topology": ", ".join(str(v) for v in topology.values() if v and v != "none") or None,
        "seed": run.get("seed"),
        "code": _code(run),
        "composition": run.record.get("composition_hash"),
    }
    known = {key: str(value) for key, value in facts.items() if value is not None}
    again = f"python launch/reproduce.py {shlex.quote(str(run.folder))}"
    return [Facts(known), *([Facts({"the same again": again}, code=True)] if run.status == "done" else [])]


def _hardware(run: Run) -> str | None:
    name = run.get("hardware", "name") or run.plan.get("hardware")
    found = [f"{gpu.get('product')} ({gpu.get('gfx')})" for gpu in objects(dig(run.record, "host", "gpus"))]
    used = {str(gpu) for p in objects(run.plan.get("processes")) for gpu in listed(p.get("gpus"))}
    device = run.result.get("device")
    parts = [str(name)] if name else []
    parts += [str(device)] if device else []
    parts += [f"{len(found)} GPU(s) there: {', '.join(dict.fromkeys(found))}"] if found else []
    parts += [f"{len(used)} used"] if used else ["no GPU used"] if "processes" in run.plan else []
    return "; ".join(parts) or None


def _host(run: Run) -> str | None:
    host = run.record.get("host") or {}
    names = {
        "hostname": "",
        "kernel": "Linux ",
        "num_cores": "cores: ",
        "rocm": "ROCm ",
        "amdgpu_driver": "amdgpu ",
        "nvidia_driver": "NVIDIA driver ",
    }
    return ", ".join(f"{before}{host[key]}" for key, before in names.items() if host.get(key)) or None


def _image(image: dict[str, Any]) -> str:
    """Its reference with the digest, its id, what it was built on."""
    base = image.get("base")
    base = base.get("name") if isinstance(base, dict) else base
    parts = [text(image.get("reference") or image.get("name"))]
    parts += [f"id {image['id']}"] if image.get("id") else []
    parts += [f"built on {base}"] if base else []
    return ", ".join(parts) + ("" if image.get("verified", True) else " (unverified: named by a tag)")


def _packages(run: Run) -> str:
    versions = run.record.get("packages") or {}
    return ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)


def _model(run: Run) -> str | None:
    name, size = run.get("model", "name") or run.plan.get("model"), run.get("model", "num_parameters")
    source = run.get("model", "path") or (run.get("model", "hub_id") if run.get("model", "init") != "random" else "random weights")
    revision = run.get("model", "revision")
    parts = [name, f"{number(size)} parameters" if is_number(size) else None, source, f"revision {revision}" if revision else None]
    return ", ".join(str(part) for part in parts if part) or None


def _data(run: Run) -> str | None:
    kind = run.get("data", "kind")
    source = run.get("data", "path") or run.get("data", "hub_id") or ""
    tasks = ", ".join(str(dig(task, "name")) for task in objects(run.get("data", "tasks")))
    digests = ", ".join(f"{Path(f).name} sha256 {str(d)[:16]}" for f, d in table(dig(run.record, "data", "files")).items())
    return (
        ", ".join(part for part in (str(kind or ""), str(source), tasks if kind in ("reasoning", "code") else "", digests) if part) or None
    )


def _code(run: Run) -> str | None:
    commit = dig(run.record, "code", "commit")
    if not commit:
        return None
    return f"commit {commit}" + (", with changes that are not committed" if dig(run.record, "code", "dirty") else "")


def configuration(run: Run) -> list[Any]:
    """Every value, every process's command, behind a line each."""
    blocks: list[Any] = []
    if run.config:
        blocks.append(Pre("The whole configuration", json.dumps(run.config, indent=1, ensure_ascii=False), folded=True))
    if run.plan.get("trainer_args"):
        blocks.append(Pre("Arguments of the trainer", json.dumps(run.plan["trainer_args"], indent=1, ensure_ascii=False), folded=True))
    for process in objects(run.plan.get("processes")):
        given = "\n".join(f"{k}={v}" for k, v in table(process.get("env")).items())
        argv = shlex.join(map(str, listed(process.get("argv"))))
        blocks.append(Pre(f"Process {process.get('name')}: command and environment", f"{argv}\n\n{given}", folded=True))
    return blocks
