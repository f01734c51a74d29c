"""Measure on this machine's GPUs how much RAFT, GRPO and DPO improve the same SFT, over seeds.

    python tests/gpu/learning.py measure hardware=h200 --gpus 2 --seconds 540
                            a second call resumes
    python tests/gpu/learning.py report
                            updates docs/results/learning.md, or the page next to --rows

`measure` runs the phases of experiment=learning, learning_cups and learning_smollm2. First it
trains the SFT of every seed. RAFT, GRPO (synchronous, overlapping, streaming) and DPO then start
from that SFT, each as a separate pipeline. A pipeline takes two GPUs but mostly uses one, so
`--share` pipelines run on the same two GPUs. With `--gpus 1`, GRPO's server and trainer take turns.

After `--seconds`, all runs are stopped; the next call resumes them from `--folder`. A row is added
to `--rows` when its evaluation ends. A pipeline whose rows exist is not run again, so remove both
after changing settings. `--only cups` selects the pipelines whose names contain the word.
`--smollm2` is the directory of SmolLM2's weights; without it, only models with random weights are
trained. `--smoke` runs small versions of all pipelines on a CPU. See docs/learning.md.
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
from tests.gpu.speed_report import RESULTS, replaced

EXPERIMENTS = {
    "qwen3_76m": "learning",
    "qwen3_76m_cups": "learning_cups",
    "smollm2_135m": "learning_smollm2",
}
ROWS = RESULTS / "learning.jsonl"
EMPTY = "<!-- learning: begin -->\n<!-- learning: end -->\n"
GAP = "sampling/sampling_logp_difference"
# Pipeline -> the methods whose rows it yields. The longest pipelines come first.
BRANCHES = {
    "grpo": ("grpo",),
    **{mode: (mode,) for mode in MODES},
    "raft": ("sft", "raft"),
    "dpo": ("dpo",),
}
ATTEMPTS = 2  # vLLM fails to start if another process frees memory while vLLM measures it


@dataclass(frozen=True)
class Pipeline:
    name: str
    gpus: int
    overrides: list[str]
    start: str = ""
    seed: int = 0


def common(options: argparse.Namespace, start: str, model: Path | None = None) -> list[str]:
    """Return the overrides that all pipelines of a start share. `model`: the model to train."""
    overrides = [options.hardware, f"experiment={EXPERIMENTS[start]}"]
    overrides.append(f"run_root={options.folder.absolute() / 'runs'}")
    # preflight=warn, because other pipelines use memory of the same GPU.
    overrides += ["tracking=none", "preflight=warn", "runtime.stop_timeout_s=40"]
    model = model or (options.smollm2 if start == "smollm2_135m" else None)
    if options.smoke:
        return [*overrides, "smoke=true"]
    return [*overrides, f"model.path={model.absolute()}"] if model else overrides


def experiment(options: argparse.Namespace, start: str) -> list[dict[str, Any]]:
    """Return the experiment's phases as in conf/experiment, for the number of GPUs."""
    composed = compose([options.hardware, f"experiment={EXPERIMENTS[start]}"]).phases
    phases = [{key: value for key, value in vars(phase).items() if value} for phase in composed]
    modes = MODES if options.gpus > 1 else ()
    phases += [in_mode(phase, mode) for mode in modes for phase in phases if is_grpo(phase)]
    for phase in phases if options.gpus == 1 else ():
        phase["overrides"] = [
            "topology.num_gpus=1" if o == "topology.num_gpus=2" else o for o in phase["overrides"]
        ]
    return phases


def is_grpo(phase: dict[str, Any]) -> bool:
    return str(phase["name"]).startswith("grpo")


def in_mode(phase: dict[str, Any], mode: str) -> dict[str, Any]:
    """Return GRPO's phase, or its evaluation, with another topology.overlap."""
    changed = [f"topology.overlap={MODES[mode]}"] if phase["name"] == "grpo" else []
    names = {key: phase[key].replace("grpo", mode) for key in ("name", "model_from")}
    return {**phase, **names, "overrides": [*phase["overrides"], *changed]}


def sfts(options: argparse.Namespace) -> list[Pipeline]:
    """Return the SFT of every seed and start, ordered by seed."""
    pipelines = []
    for seed in options.seeds:
        for start in starts(options):
            name = f"learning-{start}-{seed}"
            phases = phases_given(p for p in experiment(options, start) if p["name"] == "sft")
            overrides = [*common(options, start), f"seed={seed}", f"name={name}", phases]
            pipelines.append(Pipeline(name, 1, overrides, start, seed))
    return pipelines


def branches(options: argparse.Namespace, sft: Pipeline) -> list[Pipeline]:
    """Return the pipelines that start from an SFT, or [] if the SFT is not done."""
    model = model_of(sft, options.folder)
    if model is None:
        return []
    all_phases = experiment(options, sft.start)
    settings = [*common(options, sft.start, model), f"seed={sft.seed}"]
    pipelines = []
    for method in BRANCHES:
        phases = [phase for phase in all_phases if phase["name"].startswith(method)]
        if not phases:  # one GPU has no overlapping modes of GRPO
            continue
        name = f"{sft.name}-{method}"
        overrides = [*settings, f"name={name}", phases_given(phases)]
        pipelines.append(Pipeline(name, min(2, options.gpus), overrides, sft.start, sft.seed))
    return pipelines


def phases_given(phases: Iterable[dict[str, Any]]) -> str:
    """Return the override phases=[...] in Hydra's grammar, with quoted strings.

    A `model_from` that is not among the phases is left out, so that `model.path` takes effect.
    """
    phases = list(phases)
    names = {phase["name"] for phase in phases}
    kept = [
        {key: value for key, value in phase.items() if key != "model_from" or value in names}
        for phase in phases
    ]
    texts = (
        ",".join(f"{key}:{json.dumps(value)}" for key, value in phase.items()) for phase in kept
    )
    return f"phases=[{','.join(f'{{{text}}}' for text in texts)}]"


def starts(options: argparse.Namespace) -> list[str]:
    return [
        start
        for start in EXPERIMENTS
        if start != "smollm2_135m" or options.smollm2 or options.smoke
    ]


def slots(options: argparse.Namespace, gpus: int) -> list[list[int]]:
    """Return the GPUs of each pipeline that may run in parallel; [[]] on a CPU.

    Of pipelines that share GPUs, every second one has them in reverse order. So phases that need
    one GPU are spread over both.
    """
    if options.smoke:
        return [[]]
    all_gpus = gpus_here(options.gpus)
    groups = [all_gpus[at : at + gpus] for at in range(0, len(all_gpus) - gpus + 1, gpus)]
    return [group[::-1] if turn % 2 else group for turn in range(options.share) for group in groups]


def run(
    todo: list[Pipeline],
    free: list[list[int]],
    options: argparse.Namespace,
    harvest: Callable[[Pipeline], None],
    until: float,
) -> None:
    """Run pipelines in the `free` slots until all are done or the time `until` (monotonic).

    Call `harvest` for every running pipeline twice a second. Exit if there is no slot.
    """
    if todo and not free:
        raise SystemExit(
            f"--gpus {options.gpus} needs more GPUs than {MASK}={os.environ.get(MASK, '')} has."
        )
    left = [(pipeline, ATTEMPTS) for pipeline in todo]
    running: list[tuple[Pipeline, int, subprocess.Popen[bytes], list[int], float]] = []
    stopped = False
    options.folder.mkdir(parents=True, exist_ok=True)
    while running or (left and not stopped):
        if time.monotonic() > until and not stopped:
            stopped = True
            for _, _, process, _, _ in running:
                process.terminate()
        while left and free and not stopped:
            pipeline, attempts = left.pop(0)
            mask = free.pop(0)
            process = start(pipeline, mask, options.folder)
            running.append((pipeline, attempts - 1, process, mask, time.monotonic()))
        time.sleep(0.5)
        for entry in list(running):
            pipeline, attempts, process, mask, began = entry
            code = process.poll()
            harvest(pipeline)
            if code is not None:
                running.remove(entry)
                free.append(mask)
                print(f"{pipeline.name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)
                if code not in (EXIT_DONE, EXIT_INTERRUPTED):
                    log = options.folder / f"{pipeline.name}.log"
                    print(f"  reason: see the end of {log}", flush=True)
                    left += [(pipeline, attempts)] if attempts and code != EXIT_USER else []
    for pipeline, _ in left:
        print(f"{pipeline.name}: not run, no time left", flush=True)


def start(pipeline: Pipeline, mask: list[int], folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, **({MASK: ",".join(map(str, mask))} if mask else {})}
    with (folder / f"{pipeline.name}.log").open("ab") as log:
        argv = [sys.executable, str(ROOT / "launch/run.py"), *pipeline.overrides]
        return subprocess.Popen(argv, env=env, stdout=log, stderr=log)


def newest(pipeline: Pipeline, folder: Path) -> dict[str, Path]:
    """Return phase -> directory of a pipeline's newest run, in order."""
    run_dirs = sorted((folder / "runs" / pipeline.name).glob("[0-9]*/record.json"))
    record = json_files.read_json(run_dirs[-1]) if run_dirs else None
    phases = record["phases"] if record else {}
    return {name: run_dirs[-1].parent / path for name, path in phases.items()}


def model_of(sft: Pipeline, folder: Path) -> Path | None:
    """Return the directory of an SFT's model, or None if the SFT is not done."""
    phase = newest(sft, folder).get("sft")
    result = json_files.read_json(phase / "result.json") if phase else None
    return phase / "model" if phase and result and result.get("status") == "done" else None


def row_of(pipeline: Pipeline, method: str, folder: Path, hardware: str) -> dict[str, Any] | None:
    """Return a row with a method's last evaluation, or None if an evaluation is not done."""
    run_phases = newest(pipeline, folder).items()
    phases = {name: path for name, path in run_phases if name.startswith(METHODS[method])}
    evaluations = [path for name, path in phases.items() if "evaluate" in name]
    results = [json_files.read_json(path / "result.json") or {} for path in evaluations]
    if not results or any(result.get("status") != "done" for result in results):
        return None
    record = json_files.read_json(evaluations[-1] / "record.json") or {}
    last = results[-1]
    row = {"hardware": hardware, "start": pipeline.start, "seed": pipeline.seed, "method": method}
    row |= {key: last[key] for key in ("accuracy", "interval")}
    row["right"] = "".join(map(str, last["right_per_problem"]))
    row["by_level"] = {level: figures["accuracy"] for level, figures in last["by_level"].items()}
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
        row |= grpo_figures(phases[method])
    return row


def grpo_figures(folder: Path) -> dict[str, Any]:
    """Return the number of samples and GPUs, and the reward and end time of each step.

    `logp_gap` is [mean, maximum] of the absolute difference between the trainer's and the server's
    log-probabilities of sampled tokens.
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


def measure(options: argparse.Namespace) -> None:
    rows = read_rows(options.rows)
    known = {(row["hardware"], row["start"], row["seed"], row["method"]) for row in rows}
    name, until = options.hardware.partition("=")[2], time.monotonic() + options.seconds

    def harvest(pipeline: Pipeline) -> None:
        for method in METHODS:
            key = (name, pipeline.start, pipeline.seed, method)
            row = None if key in known else row_of(pipeline, method, options.folder, name)
            if row is not None:
                known.add(key)
                options.rows.parent.mkdir(parents=True, exist_ok=True)
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{pipeline.name}: {method} {row['accuracy']:.1%}", flush=True)

    firsts = sfts(options)
    for sft in firsts:
        for pipeline in branches(options, sft):
            harvest(pipeline)  # adds rows of earlier calls if --rows is another file
    names = [f"{sft.name}-{method}" for sft in firsts for method in BRANCHES]
    if not any(word in pipeline_name for pipeline_name in names for word in options.only):
        raise SystemExit(
            f"--only {','.join(options.only)} matches no pipeline. Names: {', '.join(names)}."
        )
    missing = {
        f"{sft.name}-{method}"
        for sft in firsts
        for method, rows in BRANCHES.items()
        if any((name, sft.start, sft.seed, row) not in known for row in rows)
        and any(word in f"{sft.name}-{method}" for word in options.only)
    }
    firsts = [sft for sft in firsts if any(key.startswith(f"{sft.name}-") for key in missing)]
    untrained = [sft for sft in firsts if model_of(sft, options.folder) is None]
    run(untrained, slots(options, 1), options, lambda pipeline: None, until)
    todo = [p for sft in firsts for p in branches(options, sft) if p.name in missing]
    todo.sort(key=lambda pipeline: list(BRANCHES).index(pipeline.name.rpartition("-")[2]))
    run(todo, slots(options, min(2, options.gpus)), options, harvest, until)


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
    parser.add_argument("--share", type=int, default=9, help="pipelines per group of GPUs")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[""],
        help="only pipelines whose name contains one of these words",
    )
    parser.add_argument(
        "--smollm2", type=Path, help="directory with SmolLM2's weights (recipes/from_gguf.py)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit; stopping takes up to 30 s more"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--smoke", action="store_true", help="run on a CPU; rows go to --folder")
    options = parser.parse_args(argv)
    if options.smollm2 and not (options.smollm2 / "config.json").is_file():
        parser.error(
            f"--smollm2 {options.smollm2} is not a model. recipes/from_gguf.py creates one; see "
            "docs/learning.md."
        )
    options.rows = options.rows or (options.folder / "learning.jsonl" if options.smoke else ROWS)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    try:
        if options.what == "measure":
            measure(options)
            return
    except UserError as error:
        raise SystemExit(str(error)) from error
    page = options.rows.with_suffix(".md")
    text = page.read_text(encoding="utf-8") if page.is_file() else EMPTY
    section = report(read_rows(options.rows), page.parent)
    page.write_text(replaced(text, "learning", section), encoding="utf-8")
    print(f"wrote {page} from {options.rows}")


if __name__ == "__main__":
    main()
