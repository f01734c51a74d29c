"""Run a recorded run again and compare: code, composition, packages, data and host first, then every metric to the last digit.

    python launch/reproduce.py runs/sft-tiny-cpu/20261121-101500-a1b2c3

Exit codes: 0 the metrics are equal; 2 the record cannot be trusted; 4 the metrics differ or the run failed; 75 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import record
from launch.command_line.stream import run_program
from launch.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, HostError, UserError
from launch.execute import check_host, execute, signals
from launch.files import rundir, sealed
from launch.files.resuming import recorded_config
from launch.machine import detect
from launch.plan import make_plan, prepare

# Figures of time and memory: they vary from run to run and are not compared.
VARIES = {"time_s", "step_s", "tokens_per_second", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_peak_gb"}
VARIES |= {"generation_s", "wait_s", "sync_s", "reward_s", "train_s", "server_s", "verification_s", "eval_s"}
COMPARED = ("code", "packages", "locks", "image", "model", "data", "host")


def reproduce(run_dir: Path) -> int:
    recorded = load_record(run_dir / "record.json")
    folders = [run_dir / folder for folder in recorded["phases"].values()] if "phases" in recorded else [run_dir]
    runs = [(folder, load_done(folder)) for folder in folders]  # all, before the first is run again
    codes = [EXIT_DONE]
    with signals() as stopping:
        for folder, of_run in runs:
            codes.append(EXIT_INTERRUPTED if stopping else reproduce_one(folder, of_run, stopping))
            if codes[-1] == EXIT_INTERRUPTED:
                print(f"interrupted: {folder.name} was not compared, nor what comes after it; the same command starts over")
                break
    return max(codes)


def load_done(run_dir: Path) -> dict[str, Any]:
    """The record of a run that is done. Raises UserError as `load_record`, and for one that is not."""
    recorded = load_record(run_dir / "record.json")
    if recorded["status"] != "done":
        raise UserError(f"{run_dir}: its status is {recorded['status']}; only a run that is done can be compared.")
    return recorded


def load_record(path: Path) -> dict[str, Any]:
    """Raises UserError for a record that is absent, lacks a required field, or was changed."""
    recorded = rundir.read_json(path)
    if recorded is None and os.path.exists(path):
        raise UserError(f"{path.parent}: {rundir.DAMAGED}. What it ran is not known any more; give another run.")
    if recorded is None:
        raise UserError(
            f"{path}: no record there.{rundir.runs_in(path.parent)} Give the directory of a run, for example runs/<name>/<timestamp>-<id>."
        )
    found = sealed.faults(recorded)
    if found:
        raise UserError(f"{path}: refused, since it cannot be trusted. {'; '.join(found)}.")
    return recorded


def reproduce_one(run_dir: Path, recorded: dict[str, Any], stopping: list[int]) -> int:
    """One run from the composition it recorded, into a new directory beside it. `stopping`: signals that asked to stop."""
    config, warnings = prepare(recorded_config(recorded["composition"]))
    for before in recorded.get("earlier", []):
        print(f"a part of it ran on other ranks ({' '.join(before['overrides'])}): sums rounded otherwise, and last digits will differ")
    host = detect.host(sys.executable)
    again_dir = run_dir.parent / f"{run_dir.name}{rundir.AGAIN}{rundir.fresh_name()}"
    plan = make_plan(config, host, again_dir, warnings)
    image = check_host(plan, host)
    _say_differences(recorded, record.begin(plan, host, image, recorded["overrides"], recorded["parent"]))
    exit_code = execute(plan, host, image, recorded["overrides"], parent=recorded["run_id"], stopping=stopping)
    if exit_code == EXIT_INTERRUPTED:
        return exit_code
    if exit_code != EXIT_DONE:
        print(f"the run failed again with exit code {exit_code}: {again_dir}")
        return EXIT_FAILED
    return _compare(run_dir, again_dir)


def _say_differences(then: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [line for part in COMPARED for line in rundir.differences(then[part], now[part], part)]
    if then["composition_hash"] != now["composition_hash"]:
        differing += rundir.differences(then["composition"], now["composition"], "composition")
    print(f"{len(differing)} difference(s) in {', '.join((*COMPARED, 'composition'))}")
    for line in differing:
        print(f"  {line}")


def compare_metrics(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """`step n, key: then -> now` for every figure that differs in any digit."""
    if len(then) != len(now):
        return [f"{len(then)} lines then, {len(now)} now"]
    found = []
    for old, new in zip(then, now, strict=True):
        keep = sorted({*old, *new} - VARIES)
        found += [f"step {old.get('step')}, {key}: {old.get(key)} -> {new.get(key)}" for key in keep if old.get(key) != new.get(key)]
    return found


def _compare(run_dir: Path, again_dir: Path) -> int:
    then, now = (rundir.read_metrics(folder / "metrics.jsonl") for folder in (run_dir, again_dir))
    differing = compare_metrics(then, now)
    results = [rundir.read_json(folder / "result.json") or {} for folder in (run_dir, again_dir)]
    for key in ("weights_sha256", "data_sha256", "selected_sha256", "accuracy"):
        if results[0].get(key) != results[1].get(key):
            differing.append(f"result.{key}: {results[0].get(key)} -> {results[1].get(key)}")
    if not differing:
        print(f"equal: {len(then)} lines of metrics and the results, to the last digit\n{again_dir}")
        return EXIT_DONE
    print(f"{len(differing)} figure(s) differ; the first: {differing[0]}\n{again_dir}")
    return EXIT_FAILED


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return EXIT_DONE if arguments in (["-h"], ["--help"]) else UserError.exit_code
    try:
        return reproduce(Path(arguments[0]).absolute())
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    run_program(main)
