"""Collect a pipeline's figures and the doctor's findings in hardware_report.json.

The file is meant to be published, so it contains no paths or names of the host from the records.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import UserError
from launch.estimate.speed import GEMM_FP32
from launch.execution.record import now
from launch.plan import show
from launch.plan.next_steps import short_path
from launch.plan.process_env import ROOT
from launch.reports import html_page, many, run_page, run_tables
from launch.reports.formats import duration, mark_of, ratio
from launch.reports.parts import Block, Cell, Facts, Note, Page, build_sections, table
from launch.reports.run_files import Run, phases_of, read, value_at
from launch.schema import Config
from launch.schema.enums import Mode, Vendor
from launch.study import pipeline

FILE = "hardware_report.json"
DOCTOR_TIMEOUT_S = 300.0  # its active tests take at most 180 s
HOST = ("kernel", "python", "num_cores", "amdgpu_driver", "rocm", "nvidia_driver")
GPU = ("product", "gfx", "memory_gb", "compute_units")
PACKAGES = ("torch", "triton", "transformers", "trl", "vllm")

Content = dict[str, Any]


def run(config: Config, request: Request) -> int:
    """Run the pipeline and write its report; return the exit code. Raises as the pipeline."""
    is_cpu = config.hardware.vendor == Vendor.none and not config.smoke
    if is_cpu and config.mode == Mode.run:
        raise UserError(
            "hardware_report=true: hardware=cpu would need hours for these sizes. Use: smoke=true."
        )
    return pipeline.run(config, request, at_end=write)


def write(config: Config, run_dir: Path) -> None:
    """Test the machine, write the report's files, and print how to publish them."""
    show.say(config, "\ndoctor: testing this machine")
    hardware = "cpu" if config.smoke else config.hardware.name
    content = {**collect(run_dir), "smoke": config.smoke, "doctor": doctor(hardware)}
    json_files.write_json(run_dir / FILE, content)
    html = run_dir / "report.html"
    json_files.write_text(html, html_page.render(page(run_dir)))
    for stage in content["stages"]:
        why = f": {' '.join(stage['why'].split())}" if stage["why"] else ""
        show.say(config, f"  {stage['stage']:<14}{stage['status']}{why}")
    findings = content["doctor"]
    failed = [c["name"] for c in findings.get("checks", []) if c["status"] == "fail"]
    problem = findings.get("error") or ", ".join(failed)
    show.say(config, f"  {'doctor':<14}{'failed: ' + problem if problem else 'done'}")
    show.say(config, f"Report: {short_path(html)}")
    show.say(
        config,
        f"To publish it: read {short_path(run_dir / FILE)}, open a new issue with the form "
        '"Hardware report" (.github/ISSUE_TEMPLATE/hardware_report.yml), and attach the file.',
    )


def doctor(hardware: str) -> Content:
    """Return the doctor's checks and measurements with active tests, or an `error`."""
    argv = [sys.executable, str(ROOT / "launch" / "doctor.py"), f"hardware={hardware}"]
    argv += ["active=true", "format=json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DOCTOR_TIMEOUT_S)
        content = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {DOCTOR_TIMEOUT_S:g} s"}
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    return {key: content[key] for key in ("checks", "measured") if key in content}


def collect(run_dir: Path) -> Content:
    """Return the machine and the stages of a pipeline: status, reason, and figures."""
    record = json_files.read_json(run_dir / "record.json") or {}
    not_run = record.get("not_run") or {}
    names = record.get("phases") or {}
    runs = dict(zip(names, (read(folder) for folder in phases_of(run_dir)), strict=True))
    recorded: Content = next((run.record for run in runs.values() if run.record), {})
    stages = [
        {
            "stage": name,
            "method": run.get("method", "name"),
            "status": "not run" if name in not_run and not run.record else run.status,
            "why": not_run.get(name) or reason(run),
            "seconds": run_page.elapsed_s(run) if run.record else None,
            "compiled": run.result.get("compiled"),
            "composition_hash": run.record.get("composition_hash"),
            "figures": bench_figures(run) if run_tables.rows_of(run) else training_figures(run),
        }
        for name, run in runs.items()
    ]
    stages += [
        {"stage": name, "status": "not run", "why": why, "figures": []}
        for name, why in not_run.items()
        if name not in runs
    ]
    return {"schema": 1, "created": now(), **machine(recorded), "stages": stages}


def reason(run: Run) -> str | None:
    """Return the first line of what the launcher or the run said about a failure."""
    record, result = run.record, run.result
    failure = record.get("failure") or result.get("error") or value_at(record, "result", "error")
    return str(failure).splitlines()[0] if failure else None


def machine(record: Content) -> Content:
    """Return facts about hardware and software of a run's record."""
    host, packages, image = (record.get(key) or {} for key in ("host", "packages", "image"))
    gpus = [{key: gpu.get(key) for key in GPU} for gpu in host.get("gpus") or []]
    return {
        "hardware": value_at(record, "composition", "hardware", "name"),
        "gpus": gpus,
        "host": {key: host.get(key) for key in HOST},
        "packages": {key: packages[key] for key in PACKAGES if key in packages},
        "image": {key: image[key] for key in ("name", "base") if key in image} or None,
        "commit": value_at(record, "code", "commit"),
        "dirty": value_at(record, "code", "dirty"),
    }


def bench_figures(run: Run) -> list[Content]:
    """Return a figure per row of a benchmark, with its tolerance, prediction or publication."""
    columns = run_tables.columns_of(run)
    main = str(run.result.get("figure"))
    title = next((column.get("title") for column in columns if column["key"] == main), main)
    labels = [c["key"] for c in columns if c.get("digits") is None and c.get("title")]
    figures = []
    for row in run_tables.rows_of(run):
        name = " ".join(str(row[key]) for key in labels if row.get(key) is not None)
        figure = {"figure": f"{name}: {title}", "measured": row.get(main)}
        figure |= {"predicted": predicted_tflops(run, row) if "tflops" in row else None}
        extra = ("mean_error", "tolerance", "published", "published_source", "error")
        figures.append(figure | {key: row[key] for key in extra if row.get(key) is not None})
    return figures


def predicted_tflops(run: Run, row: Content) -> float | None:
    """Return the TFLOPS that the planner assumes for matrix products of this dtype."""
    dtype = str(row.get("dtype"))
    peak = run.get("hardware", "peak_tflops", dtype)
    healthy = run.get("hardware", "healthy", "gemm") or 1.0
    return None if peak is None else peak * (GEMM_FP32 if dtype == "fp32" else healthy)


def training_figures(run: Run) -> list[Content]:
    """Return speed and memory of a training run next to the plan's."""
    planned, entry = run.plan.get("speed") or {}, run_tables.planned_memory(run) or {}
    context = 0.0 if entry.get("gpu") is None else entry["parts_gb"].get("context", 0.0)
    total = entry.get("total_gb")
    measured = partial(run_tables.measured, run)
    figures = (
        ("tokens/s", measured("tokens_per_second"), planned.get("tokens_per_second")),
        ("s per step", run_tables.step_s(run), planned.get("step_s")),
        # torch's peak does not include the memory of the driver and of libraries.
        ("peak memory, GB", run_tables.peak_gb(run), None if total is None else total - context),
        ("generation, s per step", measured("server_s"), planned.get("generation_s")),
        ("training, s per step", measured("train_s"), planned.get("training_s")),
    )
    return [
        {"figure": name, "measured": value, "predicted": predicted}
        for name, value, predicted in figures
        if value is not None
    ]


def page(run_dir: Path) -> Page:
    """Return the page of a pipeline, with its hardware report, if any, as the first sections."""
    rest = many.pipeline(run_dir)
    content = json_files.read_json(run_dir / FILE)
    if content is None:
        return rest
    sections = build_sections(
        {"Hardware report": lambda: report(content), "Doctor": lambda: findings(content["doctor"])}
    )
    return dataclasses.replace(rest, sections=[*sections, *rest.sections])


def report(content: Content) -> list[Block]:
    """Return facts about the machine, the stages and their figures."""
    gpus = [f"{gpu['product']} ({gpu['gfx']})" for gpu in content["gpus"]]
    facts = {"GPUs": ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))}
    facts |= {"hardware": content["hardware"], "commit": content["commit"]}
    facts |= content["host"] | content["packages"] | (content["image"] or {})
    stages = [
        {
            "stage": stage["stage"],
            "status": Cell(stage["status"], mark=mark_of(stage["status"])),
            "time": stage.get("seconds") and Cell(duration(stage["seconds"]), True),
            "why": stage["why"],
        }
        for stage in content["stages"]
    ]
    figures = [
        {
            "stage": stage["stage"],
            "figure": figure["figure"],
            "measured": figure.get("error") if figure["measured"] is None else figure["measured"],
            **{key: figure.get(key) for key in ("predicted", "tolerance", "published")},
            "of prediction or tolerance": Cell(
                ratio(figure["measured"], figure.get("predicted") or figure.get("tolerance")), True
            ),
            "mean error": figure.get("mean_error"),
        }
        for stage in content["stages"]
        for figure in stage["figures"]
    ]
    note = (
        "Predicted: by the planner, which assumes that products reach healthy.gemm of the peak "
        f"({GEMM_FP32:g} in fp32). It does not predict errors of kernels: they must stay below the "
        "tolerance, and are shares of the largest (mean) value in fp32, so lower is "
        "better. Peak memory is the allocator's, without the memory of the driver."
    )
    facts = {name: str(fact) for name, fact in facts.items() if fact}
    return [Facts(facts), table("Stages", stages), table("Figures", figures, note)]


def findings(doctor: Content) -> list[Block]:
    """Return a table of the doctor's checks, or a note if it failed."""
    if "error" in doctor:
        return [Note(f"The doctor failed: {doctor['error']}", "bad")]
    marks = {"pass": "good", "fail": "bad", "warn": "warn"}
    checks = (
        {
            "check": check["name"],
            "status": Cell(check["status"], mark=marks.get(check["status"], "")),
            "found": check["read"],
            "expected": check["threshold"],
        }
        for check in doctor["checks"]
    )
    return [table("Checks, with active tests", checks)]
