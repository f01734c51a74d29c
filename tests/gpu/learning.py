r"""Measure on this machine's GPUs what RAFT, GRPO and DPO each add to the same SFT, over seeds.

    python tests/gpu/learning.py plan hardware=h200 --gpus 2
                            estimates; measures nothing
    python tests/gpu/learning.py calibrate hardware=h200 --gpus 2 --steps 300,400
                            how far SFT gets in so many steps
    python tests/gpu/learning.py calibrate hardware=h200 --gpus 2 --seeds 1 --phase grpo \
        --tries method.args.temperature=1.0 \
        "method.args.learning_rate=4e-5 method.args.max_steps=100"
                            what settings of a phase make of the SFT that `measure` starts from
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
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, UserError
from launch.machine import detect
from launch.study import pipeline
from tests.gpu.jobs import MASK, ROOT, gpus_here
from tests.gpu.learning_report import GRPO, METHODS, MODES, report

EXPERIMENTS = {
    "qwen3_76m": "learning",
    "qwen3_76m_cups": "learning_cups",
    "smollm2_135m": "learning_smollm2",
}
ROWS = ROOT / "docs/results/learning.jsonl"
PAGE = ROOT / "docs/results/learning.md"
# Start of a phase (imports, weights) without and with vLLM, guessed from runs on H200s.
START_S, VLLM_START_S = 30, 75
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
    found = [
        given.hardware,
        f"experiment={EXPERIMENTS[start]}",
        f"run_root={given.folder.absolute() / 'runs'}",
    ]
    # preflight=warn: other pipelines hold memory of the same GPU.
    found += ["tracking=none", "preflight=warn", "runtime.stop_timeout_s=40"]
    model = model or (given.smollm2 if start == "smollm2_135m" else None)
    return (
        [*found, "smoke=true"]
        if given.smoke
        else [*found, *([f"model.path={model.absolute()}"] if model else [])]
    )


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
    found = []
    for seed in given.seeds:
        for start in starts(given):
            name = f"learning-{start}-{seed}"
            phases = phases_given(
                phase for phase in experiment(given, start) if phase["name"] == "sft"
            )
            found.append(
                Pipeline(
                    name,
                    1,
                    [*common(given, start), f"seed={seed}", f"name={name}", phases],
                    start,
                    seed,
                )
            )
    return found


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


def calibrations(given: argparse.Namespace) -> list[Pipeline]:
    """Return the SFT of each start in so many steps, with its evaluation."""
    return [
        Pipeline(
            name,
            1,
            [
                *common(given, start),
                f"name={name}",
                tried(given, start, "sft", [f"method.args.max_steps={steps}"]),
            ],
            start,
        )
        for start in starts(given)
        for steps in given.steps
        for name in [f"calibrate-{start}-{steps}"]
    ]


def tries(given: argparse.Namespace) -> list[Pipeline]:
    """Return a pipeline for each of `--tries`: `--phase` on one GPU, with its evaluation.

    Each starts from the SFT of every seed, if that has a model.
    """
    found = []
    for sft in sfts(given):
        model = model_of(sft, given.folder)
        for number, words in enumerate(given.tries if model else [], 1):
            name = f"{sft.name}-{given.phase}-{number}"
            phases = tried(given, sft.start, given.phase, ["topology=single", *words.split()])
            overrides = [
                *common(given, sft.start, model),
                f"seed={sft.seed}",
                f"name={name}",
                phases,
            ]
            found.append(Pipeline(name, 1, overrides, sft.start, sft.seed))
    return found


def tried(given: argparse.Namespace, start: str, phase: str, changes: list[str]) -> str:
    """Return a phase of the experiment with changes, and its evaluation."""
    own = {one["name"]: one["overrides"] for one in experiment(given, start)}
    keys = {change.partition("=")[0] for change in changes}
    kept = [
        o
        for o in own[phase]
        if o.partition("=")[0] not in keys
        and not (o.startswith("topology.") and "topology" in keys)
    ]
    evaluated = {"name": "evaluated", "model_from": phase, "overrides": own["grpo_evaluated"]}
    return phases_given([{"name": phase, "overrides": [*kept, *changes]}, evaluated])


def chosen(names: Iterable[str], given: argparse.Namespace) -> set[str]:
    """Return the names that `--only` takes; exit if there are none."""
    there = list(names)
    kept = {name for name in there if not given.only or any(word in name for word in given.only)}
    if not kept:
        raise SystemExit(
            f"--only {','.join(given.only)}: no such name. There are: {', '.join(there)}."
        )
    return kept


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
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch/run.py"), *one.overrides],
            env=env,
            stdout=log,
            stderr=log,
        )


def newest(one: Pipeline, folder: Path) -> tuple[Path, dict[str, Path]] | None:
    """Return the directory of a pipeline's newest run, and those of its phases in order."""
    found = sorted((folder / "runs" / one.name).glob("*/record.json"))
    record = json_files.read_json(found[-1]) if found else None
    return (
        (
            found[-1].parent,
            {name: found[-1].parent / path for name, path in record["phases"].items()},
        )
        if record
        else None
    )


def model_of(sft: Pipeline, folder: Path) -> Path | None:
    """Return the model that an SFT has written, or None if it is not done."""
    found = newest(sft, folder)
    done = (
        found
        and (json_files.read_json(found[1]["sft"] / "result.json") or {}).get("status") == "done"
    )
    return found[1]["sft"] / "model" if found and done else None


def row_of(one: Pipeline, method: str, folder: Path, hardware: str) -> dict[str, Any] | None:
    """Return the results of a method's last evaluation, or None if it is not done."""
    found = newest(one, folder)
    phases = (
        {}
        if found is None
        else {name: path for name, path in found[1].items() if name.startswith(METHODS[method])}
    )
    evaluations = [path for name, path in phases.items() if "evaluate" in name]
    results = [json_files.read_json(path / "result.json") or {} for path in evaluations]
    if not results or any(result.get("status") != "done" for result in results):
        return None
    record = json_files.read_json(evaluations[-1] / "record.json") or {}
    last = results[-1]
    row = {"hardware": hardware, "start": one.start, "seed": one.seed, "method": method}
    row |= {key: last[key] for key in ("accuracy", "interval")}
    row |= {
        "right": "".join(map(str, last["right_per_problem"])),
        "by_level": {k: v["accuracy"] for k, v in last["by_level"].items()},
    }
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

    def lacks(sft: Pipeline, method: str) -> bool:
        return any((name, sft.start, sft.seed, own) not in known for own in BRANCHES[method])

    firsts = sfts(given)
    wanted = chosen((f"{sft.name}-{method}" for sft in firsts for method in BRANCHES), given)
    for sft in firsts:
        for one in branches(given, sft):
            harvest(one)  # what an earlier call left, should --rows be another file
    wanted = {
        f"{sft.name}-{method}" for sft in firsts for method in BRANCHES if lacks(sft, method)
    } & wanted
    firsts = [sft for sft in firsts if any(f"{sft.name}-{method}" in wanted for method in BRANCHES)]
    run(
        [sft for sft in firsts if model_of(sft, given.folder) is None],
        slots(given, 1),
        given,
        lambda one: None,
        until,
    )
    todo = [one for sft in firsts for one in branches(given, sft) if one.name in wanted]
    todo.sort(key=lambda one: list(BRANCHES).index(one.name.rpartition("-")[2]))
    run(todo, slots(given, min(2, given.gpus)), given, harvest, until)


def calibrate(given: argparse.Namespace) -> None:
    until = time.monotonic() + given.seconds
    if given.phase:
        numbers = range(1, len(given.tries) + 1)
        names = chosen(
            (f"{sft.name}-{given.phase}-{number}" for sft in sfts(given) for number in numbers),
            given,
        )
        firsts = [
            sft
            for sft in sfts(given)
            if any(f"{sft.name}-{given.phase}-{number}" in names for number in numbers)
        ]
        run(
            [sft for sft in firsts if model_of(sft, given.folder) is None],
            slots(given, 1),
            given,
            lambda one: None,
            until,
        )
    todo = tries(given) if given.phase else calibrations(given)
    names = chosen((one.name for one in todo), given) if todo else set()
    todo = [one for one in todo if one.name in names]
    run(todo, slots(given, 1), given, lambda one: None, until)
    for number, words in enumerate(given.tries or [], 1):
        print(f"-{given.phase}-{number}: {words}")
    for one in todo:
        found = newest(one, given.folder)
        result = (
            (json_files.read_json(found[1]["evaluated"] / "result.json") or {}) if found else {}
        )
        print(
            f"{one.name}: {result['accuracy']:.1%}"
            if "accuracy" in result
            else f"{one.name}: no result"
        )


def plan(given: argparse.Namespace) -> str:
    lines = [
        f"{given.hardware}: estimates, not measured; {START_S} s are reckoned for the start "
        f"of a phase, {VLLM_START_S} with vLLM, and"
    ]
    lines += [
        "nothing for evaluations and for trainings on samples, whose rows are not known before: "
        "these are short."
    ]
    host = detect.Host(python=sys.executable, num_cores=16)
    for start in starts(given):
        overrides, seconds = (
            [*common(given, start), phases_given(experiment(given, start))],
            {"": 0.0, **dict.fromkeys(BRANCHES, 0.0)},
        )
        for name, made in pipeline.make_plans(
            compose(overrides), Request(overrides), host, Path("/runs/learning/1")
        ).items():
            starting = (
                VLLM_START_S
                if made.config.topology.servers or made.trainer_args.get("engine") == "vllm"
                else START_S
            )
            working = 3600 * (made.speed.run_hours or 0)
            seconds[next((method for method in BRANCHES if name.startswith(method)), "")] += (
                starting + working
            )
            speed = (
                f"{made.speed.tokens_per_second:,.0f} tokens/s"
                if made.speed.tokens_per_second
                else ""
            )
            lines.append(f"  {start:16} {name:22} {starting:3} s + {working:4.0f} s  {speed}")
        longest = max(seconds[method] for method in BRANCHES)
        parts = ", ".join(f"{method or 'sft'} {value:.0f} s" for method, value in seconds.items())
        beside = f", else {seconds[''] + longest:.0f} s" if given.gpus > 1 else ""
        lines.append(
            f"{start}, one seed: {parts}; one after another {sum(seconds.values()):.0f} s{beside}"
        )
    return "\n".join(lines)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["plan", "calibrate", "measure", "report"])
    parser.add_argument(
        "hardware", nargs="?", default="hardware=h200", help="hardware=<a group of conf/hardware>"
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--share", type=int, default=9, help="pipelines on the same GPUs")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=numbers, default=[300, 600, 1200])
    parser.add_argument(
        "--phase",
        choices=["raft", "grpo"],
        help="of calibrate: what goes on from the SFT of each of --seeds",
    )
    parser.add_argument(
        "--tries",
        nargs="+",
        metavar="OVERRIDES",
        help="of --phase: each a pipeline; several overrides in quotes",
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help="words, one of which a name holds"
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
    if given.phase and given.what != "calibrate":
        parser.error(f"--phase {given.phase} is of calibrate, not of {given.what}.")
    if bool(given.phase) != bool(given.tries) or not all(
        "=" in word for words in given.tries or [] for word in words.split()
    ):
        parser.error(
            "--phase and --tries go together: --phase grpo --tries method.args.temperature=1.0 "
            "method.args.temperature=1.5"
        )
    if given.smollm2 and not (given.smollm2 / "config.json").is_file():
        parser.error(
            f"--smollm2 {given.smollm2}: no model there. recipes/from_gguf.py makes one: "
            "docs/learning.md."
        )
    if given.gpus < 1:
        parser.error(f"--gpus {given.gpus}: the phases need one GPU or more.")
    given.rows = given.rows or (given.folder / "learning.jsonl" if given.smoke else ROWS)
    return given


def main(argv: list[str] | None = None) -> None:
    given = parse(argv)
    try:
        carry_out(given)
    except UserError as error:
        raise SystemExit(str(error)) from error


def carry_out(given: argparse.Namespace) -> None:
    """Do what the command line says; raise UserError for a rejected composition."""
    if given.what == "plan":
        print(plan(given))
    elif given.what == "calibrate":
        calibrate(given)
    elif given.what == "measure":
        measure(given)
    else:
        page = PAGE if given.rows == ROWS else given.rows.with_suffix(".md")
        page.write_text(report(read_rows(given.rows), page.parent), encoding="utf-8")
        print(f"{page}, from {given.rows}")


if __name__ == "__main__":
    main()
