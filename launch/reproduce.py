"""Repeat a recorded run. Compare its inputs and host, then every metric to the last digit.

    python launch/reproduce.py runs/sft-tiny-cpu/20261121-101500-a1b2c3

Exit codes: 0 the metrics are equal; 2 the record is missing or was changed; 4 the metrics differ or
the run failed; 75 interrupted.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))

from launch.core import stop_signals

if __name__ == "__main__":
    stop_signals.install()

import launch.core.installed  # noqa: F401

# isort: split
from pathlib import Path
from typing import Any

from launch.config.identity import recorded_hash
from launch.config.request import Request
from launch.core import json_files
from launch.core.console import run_program
from launch.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.execution import record
from launch.execution.execute import check_host, execute, signals
from launch.inputs.paths import pinned
from launch.machine import detect
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan, prepare
from launch.plan.resuming import recorded_config

# Times and memory vary from run to run, so they are not compared.
# fmt: off
NOT_COMPARED = {
    "time_s", "step_s", "tokens_per_second", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu",
    "samples_per_second", "memory_peak_gb", "memory_allocated_gb", "memory_reserved_gb",
    "generation_s", "wait_s", "sync_s", "reward_s", "train_s", "server_s", "transfer_s",
    "verification_s", "eval_s",
}
COUNTERS = ("gpu_", "card_")  # of recipes/measure/telemetry.py
# fmt: on
COMPARED = ("code", "packages", "locks", "image", "model", "data", "host")


def reproduce(run_dir: Path) -> int:
    """Repeat a run, or each phase of a pipeline; return the highest exit code."""
    record = load_record(run_dir)
    phases, not_run = record.get("phases"), record.get("not_run") or {}
    folders = [run_dir]
    if phases is not None:
        folders = [run_dir / folder for name, folder in phases.items() if name not in not_run]
    records = [load_record(folder) for folder in folders]  # check all of them before any run
    for folder, recorded in zip(folders, records, strict=True):
        if (status := recorded["status"]) != "done":
            raise UserError(
                f"{folder}: status {status}. Only a run with status done can be reproduced."
            )
    codes = [EXIT_DONE]
    with signals() as stop_signals:
        for folder, recorded in zip(folders, records, strict=True):
            code = (
                EXIT_INTERRUPTED if stop_signals else reproduce_one(folder, recorded, stop_signals)
            )
            codes.append(code)
            if code == EXIT_INTERRUPTED:
                print(
                    f"Interrupted: {folder.name} and later phases were not compared. Repeat the "
                    "command to start over."
                )
                break
    return max(codes)


def load_record(run_dir: Path) -> dict[str, Any]:
    """Return a run's record. Raises UserError if it is missing, incomplete or changed."""
    path = run_dir / "record.json"
    recorded = json_files.read_json(path)
    if recorded is None:
        problem = rundir.DAMAGED if os.path.exists(path) else "it has no record.json"
        raise UserError(
            f"{run_dir}: {problem}.{rundir.runs_in(run_dir)} Name the directory of a run, "
            "for example runs/<name>/<timestamp>-<id>."
        )
    if problems := sealed.problems(recorded):
        raise UserError(f"{path}: rejected because it was changed. {'; '.join(problems)}.")
    return recorded


def reproduce_one(run_dir: Path, recorded: dict[str, Any], stop_signals: list[int]) -> int:
    """Run the recorded composition in a new directory next to the run; return the exit code.

    `stop_signals` contains the stop signals received so far.
    """
    config, warnings = prepare(recorded_config(recorded["composition"]))
    for earlier in recorded.get("earlier", []):
        print(
            f"Part of the run used other ranks ({' '.join(earlier['overrides'])}). Their sums are "
            "rounded differently, so last digits will differ."
        )
    host = detect.host(sys.executable)
    again_dir = run_dir.parent / f"{run_dir.name}{rundir.AGAIN}{rundir.fresh_name()}"
    plan = make_plan(config, host, again_dir, warnings, Request(recorded["overrides"]))
    image = check_host(plan, host)
    now = record.begin(plan, host, image, recorded["parent"])
    is_same = recorded_hash(recorded) == now["composition_hash"]
    parts = COMPARED if is_same else (*COMPARED, "composition")
    if plan.containers:  # only the ranks know their packages, which `image` determines
        now["packages"] = recorded["packages"]
    lines = [x for part in parts for x in rundir.differences(recorded[part], now[part], part)]
    print(f"{len(lines)} difference(s) in {', '.join((*COMPARED, 'composition'))}")
    print("".join(f"  {line}\n" for line in lines), end="")
    exit_code = execute(plan, host, image, recorded["run_id"], stop_signals)
    if exit_code == EXIT_INTERRUPTED:
        return exit_code
    if exit_code != EXIT_DONE:
        print(f"The repeated run failed with exit code {exit_code}: {again_dir}")
        return EXIT_FAILED
    return compare(run_dir, again_dir)


def compare_metrics(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Return a line `step n, key: then -> now` for every metric that differs in any digit."""
    if len(then) != len(now):
        return [f"{len(then)} lines of metrics then, {len(now)} now"]
    return [
        f"step {old.get('step')}, {key}: {old.get(key)} -> {new.get(key)}"
        for old, new in zip(then, now, strict=True)
        for key in sorted({*old, *new} - NOT_COMPARED)
        if old.get(key) != new.get(key) and not key.startswith(COUNTERS)
    ]


def compare(run_dir: Path, again_dir: Path) -> int:
    """Compare metrics and results; return the exit code."""
    folders = (run_dir, again_dir)
    then, now = (json_files.read_metrics(folder / "metrics.jsonl") for folder in folders)
    old, new = (json_files.read_json(folder / "result.json") or {} for folder in folders)
    differences = compare_metrics(then, now)
    for key in ("weights_sha256", "data_sha256", "selected_sha256", "accuracy", "reward"):
        if old.get(key) != new.get(key):
            differences.append(f"result.{key}: {old.get(key)} -> {new.get(key)}")
    if not differences:
        print(
            f"equal: {len(then)} lines of metrics and the results, to the last digit\n{again_dir}"
        )
        return EXIT_DONE
    print(f"{len(differences)} difference(s), the first: {differences[0]}\n{again_dir}")
    return EXIT_FAILED


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return EXIT_DONE if arguments in (["-h"], ["--help"]) else UserError.exit_code
    try:
        return reproduce(pinned(arguments[0]))
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    run_program(main)
