"""Measure on this machine's GPUs what RAFT, GRPO and DPO each add to the same SFT, over seeds.

    python tests/gpu/learning.py measure hardware=h200 --gpus 2 --seconds 540
                            a second call continues
    python tests/gpu/learning.py report
                            docs/results/learning.md; needs no GPU

`measure` runs the phases of experiment=learning, learning_cups and learning_smollm2. The SFT of
every seed comes first. RAFT, GRPO (synchronous, overlapping, streaming) and DPO then start from it,
each as a pipeline of its own. A pipeline takes two GPUs but mostly uses one, so `--share` of them
run on the same two. With `--gpus 1` GRPO's server and trainer take turns on the only GPU.

After `--seconds` nothing starts, and what runs is stopped; the next call resumes it from
`--folder`. A row is added to `--rows` when its evaluation ends. A pipeline that has its rows is not
run again, so remove both after changing settings. `--only cups` takes the pipelines whose names
contain the word. `--smollm2` is the directory of its weights; without it only models with random
weights are trained. `--smoke` runs all of it small, on a CPU. See docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.config.compose import compose
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, UserError
from tests.gpu.jobs import MASK, ROOT, gpus_here
from tests.gpu.learning_report import GRPO, METHODS, MODES, report

EXPERIMENTS = {
    "qwen3_76m": "learning",
    "qwen3_76m_cups": "learning_cups",
    "smollm2_135m": "learning_smollm2",
}
ROWS = ROOT / "docs/results/learning.jsonl"
PAGE = ROOT / "docs/results/learning.md"
GAP = "sampling/sampling_logp_difference"
# The longest first -> the methods whose rows it gives.
BRANCHES = {
    "grpo": ("grpo",),
    **{mode: (mode,) for mode in MODES},
    "raft": ("sft", "raft"),
    "dpo": ("dpo",),
}
ATTEMPTS = 2  # vLLM fails to start if another process frees memory while it measures what is free


@dataclass(frozen=True)
class Pipeline:
    name: str
    gpus: int
    overrides: list[str]
    start: str = ""
    seed: int = 0


def common(given: argparse.Namespace, start: str, model: Path | None = None) -> list[str]:
    """Return the overrides of all pipelines of a start, which train `model` if there is one."""
    overrides = [given.hardware, f"experiment={EXPERIMENTS[start]}"]
    overrides.append(f"run_root={given.folder.absolute() / 'runs'}")
    # preflight=warn: other pipelines hold memory of the same GPU.
    overrides += ["tracking=none", "preflight=warn", "runtime.stop_timeout_s=40"]
    model = model or (given.smollm2 if start == "smollm2_135m" else None)
    if given.smoke:
        return [*overrides, "smoke=true"]
    return [*overrides, f"model.path={model.absolute()}"] if model else overrides


def experiment(given: argparse.Namespace, start: str) -> list[dict[str, Any]]:
    """Return the experiment's phases as in conf/experiment, for the number of GPUs given."""
    phases = compose([given.hardware, f"experiment={EXPERIMENTS[start]}"]).phases
    found = [{key: value for key, value in vars(phase).items() if value} for phase in phases]
    two = MODES if given.gpus > 1 else ()
    found += [in_mode(phase, mode) for mode in two for phase in found if is_grpo(phase)]
    for phase in found if given.gpus == 1 else ():
        phase["overrides"] = [
            "topology.num_gpus=1" if o == "topology.num_gpus=2" else o for o in phase["overrides"]
        ]
    return found


def is_grpo(phase: dict[str, Any]) -> bool:
    return str(phase["name"]).startswith("grpo")


def in_mode(phase: dict[str, Any], mode: str) -> dict[str, Any]:
    """Return GRPO, or its evaluation, under another topology.overlap."""
    changed = [f"topology.overlap={MODES[mode]}"] if phase["name"] == "grpo" else []
    names = {key: phase[key].replace("grpo", mode) for key in ("name", "model_from")}
    return {**phase, **names, "overrides": [*phase["overrides"], *changed]}


def sfts(given: argparse.Namespace) -> list[Pipeline]:
    """Return the SFT of every seed and start, ordered by seed."""
    pipelines = []
    for seed in given.seeds:
        for start in starts(given):
            name = f"learning-{start}-{seed}"
            phases = phases_given(p for p in experiment(given, start) if p["name"] == "sft")
            overrides = [*common(given, start), f"seed={seed}", f"name={name}", phases]
            pipelines.append(Pipeline(name, 1, overrides, start, seed))
    return pipelines


def branches(given: argparse.Namespace, sft: Pipeline) -> list[Pipeline]:
    """Return a pipeline for each method that starts from an SFT, or none without its model."""
    model = model_of(sft, given.folder)
    if model is None:
        return []
    own = experiment(given, sft.start)
    settings = [*common(given, sft.start, model), f"seed={sft.seed}"]
    made = []
    for method in BRANCHES:
        phases = [phase for phase in own if phase["name"].startswith(method)]
        if not phases:  # a mode of GRPO, on one GPU
            continue
        name = f"{sft.name}-{method}"
        overrides = [*settings, f"name={name}", phases_given(phases)]
        made.append(Pipeline(name, min(2, given.gpus), overrides, sft.start, sft.seed))
    return made


def phases_given(phases: Iterable[dict[str, Any]]) -> str:
    """Return an override in Hydra's grammar: keys bare, strings quoted.

    A `model_from` that names none of the phases is left out, so that `model.path` counts.
    """
    own = list(phases)
    names = {phase["name"] for phase in own}
    own = [
        {key: value for key, value in phase.items() if key != "model_from" or value in names}
        for phase in own
    ]
    texts = (
        ",".join(f"{key}:{json.dumps(value)}" for key, value in phase.items()) for phase in own
    )
    return f"phases=[{','.join(f'{{{text}}}' for text in texts)}]"


def starts(given: argparse.Namespace) -> list[str]:
    return [
        start for start in EXPERIMENTS if start != "smollm2_135m" or given.smollm2 or given.smoke
    ]


def slots(given: argparse.Namespace, gpus: int) -> list[list[int]]:
    """Return the GPUs of each pipeline that may run at one time; none on a CPU.

    Of pipelines that share GPUs, every second one has them in reverse order, so that its phases of
    one GPU run on the other GPU.
    """
    if given.smoke:
        return [[]]
    found = gpus_here(given.gpus)
    together = [found[at : at + gpus] for at in range(0, len(found) - gpus + 1, gpus)]
    return [
        list(reversed(one)) if turn % 2 else one for turn in range(given.share) for one in together
    ]


def run(
    todo: list[Pipeline],
    free: list[list[int]],
    given: argparse.Namespace,
    harvest: Callable[[Pipeline], None],
    until: float,
) -> None:
    """Run a pipeline in each of the `free` slots until all are done or `until` (monotonic) passes.

    `harvest` is called for every running pipeline, twice a second. Exits if there is no slot.
    """
    if todo and not free:
        raise SystemExit(
            f"{MASK}={os.environ.get(MASK, '')}, --gpus {given.gpus}, --share {given.share}: no "
            "pipeline has its GPUs."
        )
    left = [(one, ATTEMPTS) for one in todo]
    running: list[tuple[Pipeline, int, subprocess.Popen[bytes], list[int], float]] = []
    stopped = False
    given.folder.mkdir(parents=True, exist_ok=True)
    while running or (left and not stopped):
        if time.monotonic() > until and not stopped:
            stopped = True
            for _, _, process, _, _ in running:
                process.terminate()
        while left and free and not stopped:
            one, attempts = left.pop(0)
            mask = free.pop(0)
            running.append(
                (one, attempts - 1, start(one, mask, given.folder), mask, time.monotonic())
            )
        time.sleep(0.5)
        for entry in list(running):
            one, attempts, process, mask, began = entry
            code = process.poll()
            harvest(one)
            if code is not None:
                running.remove(entry)
                free.append(mask)
                print(f"{one.name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)
                if code not in (EXIT_DONE, EXIT_INTERRUPTED):
                    print(f"  why: the end of {given.folder / one.name}.log", flush=True)
                    left += [(one, attempts)] if attempts and code != EXIT_USER else []
    for one, _ in left:
        print(f"{one.name}: not run, no time left", flush=True)


def start(one: Pipeline, mask: list[int], folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, **({MASK: ",".join(map(str, mask))} if mask else {})}
    with (folder / f"{one.name}.log").open("ab") as log:
        argv = [sys.executable, str(ROOT / "launch/run.py"), *one.overrides]
        return subprocess.Popen(argv, env=env, stdout=log, stderr=log)


def newest(one: Pipeline, folder: Path) -> dict[str, Path]:
    """Return the directories of the phases of a pipeline's newest run, in order."""
    run_dirs = sorted((folder / "runs" / one.name).glob("*/record.json"))
    record = json_files.read_json(run_dirs[-1]) if run_dirs else None
    phases = record["phases"] if record else {}
    return {name: run_dirs[-1].parent / path for name, path in phases.items()}


def model_of(sft: Pipeline, folder: Path) -> Path | None:
    """Return the model that an SFT has written, or None if it is not done."""
    phase = newest(sft, folder).get("sft")
    result = json_files.read_json(phase / "result.json") if phase else None
    return phase / "model" if phase and result and result.get("status") == "done" else None


def row_of(one: Pipeline, method: str, folder: Path, hardware: str) -> dict[str, Any] | None:
    """Return the results of a method's last evaluation, or None if it is not done."""
    own = newest(one, folder).items()
    phases = {name: path for name, path in own if name.startswith(METHODS[method])}
    evaluations = [path for name, path in phases.items() if "evaluate" in name]
    results = [json_files.read_json(path / "result.json") or {} for path in evaluations]
    if not results or any(result.get("status") != "done" for result in results):
        return None
    record = json_files.read_json(evaluations[-1] / "record.json") or {}
    last = results[-1]
    row = {"hardware": hardware, "start": one.start, "seed": one.seed, "method": method}
    row |= {key: last[key] for key in ("accuracy", "interval")}
    row["right"] = "".join(map(str, last["right_per_problem"]))
    row["by_level"] = {level: found["accuracy"] for level, found in last["by_level"].items()}
    row["data_sha256"] = last["data_sha256"]
    row["smoke"] = record["composition"]["smoke"]
    row["commit"] = record["code"].get("commit")
    packages = record["packages"]
    row["packages"] = {
        name: packages[name]
        for name in ("torch", "transformers", "trl", "vllm")
        if name in packages
    }
    samples = [
        json_files.read_json(path / "result.json") or {}
        for name, path in phases.items()
        if "sample" in name
    ]
    if samples:
        row["samples"] = sum(result["num_samples"] for result in samples)
    if method == "raft":
        row["cycles"] = [result["accuracy"] for result in results]
    if method in GRPO:
        row |= of_grpo(phases[method])
    return row


def of_grpo(folder: Path) -> dict[str, Any]:
    """Return samples, GPUs, and the reward and end time of each step.

    `logp_gap` is |log p of the trainer - log p of the server| of a sampled token: mean and maximum.
    """
    steps = json_files.read_metrics(folder / "metrics.jsonl")
    row: dict[str, Any] = {"rewards": [[step["step"], round(step["reward"], 4)] for step in steps]}
    row["time_s"] = [round(step["time_s"], 1) for step in steps]
    composition = (json_files.read_json(folder / "record.json") or {})["composition"]
    args, row["gpus"] = composition["method"]["args"], composition["topology"]["num_gpus"]
    row["samples"] = (
        steps[-1]["step"]
        * args["per_device_train_batch_size"]
        * args["gradient_accumulation_steps"]
    )
    if all(f"{GAP}/mean" in step for step in steps):
        row["logp_gap"] = [
            sum(step[f"{GAP}/mean"] for step in steps) / len(steps),
            max(step[f"{GAP}/max"] for step in steps),
        ]
    return row


def measure(given: argparse.Namespace) -> None:
    rows = read_rows(given.rows)
    known = {(row["hardware"], row["start"], row["seed"], row["method"]) for row in rows}
    name, until = given.hardware.partition("=")[2], time.monotonic() + given.seconds

    def harvest(one: Pipeline) -> None:
        for method in METHODS:
            key = (name, one.start, one.seed, method)
            row = None if key in known else row_of(one, method, given.folder, name)
            if row is not None:
                known.add(key)
                given.rows.parent.mkdir(parents=True, exist_ok=True)
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{one.name}: {method} {row['accuracy']:.1%}", flush=True)

    firsts = sfts(given)
    for sft in firsts:
        for one in branches(given, sft):
            harvest(one)  # what an earlier call left, should --rows be another file
    names = [f"{sft.name}-{method}" for sft in firsts for method in BRANCHES]
    if not any(word in one for one in names for word in given.only):
        raise SystemExit(
            f"--only {','.join(given.only)}: no such name. There are: {', '.join(names)}."
        )
    missing = {
        f"{sft.name}-{method}"
        for sft in firsts
        for method, rows in BRANCHES.items()
        if any((name, sft.start, sft.seed, row) not in known for row in rows)
        and any(word in f"{sft.name}-{method}" for word in given.only)
    }
    firsts = [sft for sft in firsts if any(one.startswith(f"{sft.name}-") for one in missing)]
    untrained = [sft for sft in firsts if model_of(sft, given.folder) is None]
    run(untrained, slots(given, 1), given, lambda one: None, until)
    todo = [one for sft in firsts for one in branches(given, sft) if one.name in missing]
    todo.sort(key=lambda one: list(BRANCHES).index(one.name.rpartition("-")[2]))
    run(todo, slots(given, min(2, given.gpus)), given, harvest, until)


def read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def parse(argv: list[str] | None) -> argparse.Namespace:
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "report"])
    parser.add_argument(
        "hardware", nargs="?", default="hardware=h200", help="hardware=<a group of conf/hardware>"
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--share", type=int, default=9, help="pipelines on the same GPUs")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[""],
        help="words, one of which a name holds",
    )
    parser.add_argument(
        "--smollm2", type=Path, help="directory of its weights: recipes/from_gguf.py"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="of a call; 570 s leave 30 s to stop in"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--smoke", action="store_true", help="its rows stay in --folder")
    given = parser.parse_args(argv)
    if given.smollm2 and not (given.smollm2 / "config.json").is_file():
        parser.error(
            f"--smollm2 {given.smollm2}: no model there. recipes/from_gguf.py makes one: "
            "docs/learning.md."
        )
    given.rows = given.rows or (given.folder / "learning.jsonl" if given.smoke else ROWS)
    return given


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    try:
        if given.what == "measure":
            measure(given)
            return
    except UserError as error:
        raise SystemExit(str(error)) from error
    page = PAGE if given.rows == ROWS else given.rows.with_suffix(".md")
    page.write_text(report(read_rows(given.rows), page.parent), encoding="utf-8")
    print(f"{page}, from {given.rows}")


if __name__ == "__main__":
    main()
