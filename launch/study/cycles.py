"""Expand RAFT into phases of a pipeline. A cycle samples, trains on the best, and evaluates.

Each part has a method in conf/method/. method=raft overrides arguments of that method with
its args.sample, args.train and args.evaluate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.core.errors import UserError
from launch.inputs.sample_files import SCORED
from launch.rules import phases as phase_rules
from launch.schema import Adapter, Config, Data, Method, Phase, Topology
from launch.schema.cycle_choice import CycleChoice, choose, phase_name
from launch.schema.data import Curriculum, CurriculumArgs, Selection
from launch.schema.enums import Init
from launch.schema.trainer_args import class_arguments, value

SELECTED = "selected.jsonl"  # recipes/sample.py writes it next to SCORED, for training
VERIFIER = ("rewards", "reward_chain", "reward_pattern", "reward_confined", "sandbox")
SERVER_KEYS = ("server_memory_share", "server_cache_gb", "server_max_length", "server_args")
METHODS = {"start": "sft", "sample": "sample", "train": "sft", "evaluate": "evaluate"}


@dataclass
class CyclePhase(Phase):
    part: str = "sample"  # a key of METHODS
    cycle: int = 0  # 0 means before the first cycle
    chosen: CycleChoice | None = None  # if method.selection is set
    # Group options that override the command line.
    groups: list[str] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)  # override the method's arguments
    verifier: dict[str, Any] = field(default_factory=dict)  # the keys in VERIFIER
    learning_rate_factor: float = 1.0
    pass_rates_from: str | None = None  # the previous cycle's sampling phase
    smoke_keeps: list[str] = field(default_factory=list)  # arguments that smoke must not change


def expand(
    phases: list[Phase], compose: Callable[[Phase], Config], accuracies: Mapping[str, float]
) -> list[Phase]:
    """Return `phases` with each phase of method=raft replaced by the phases of its cycles.

    A reference to a RAFT phase becomes its chosen training, last samples or chosen evaluation.
    `accuracies` maps finished evaluations to their accuracy. Raises UserError.
    """
    expanded: list[Phase] = []
    models: dict[str, str] = {}  # the user's phase -> the phase that writes its model
    samples: dict[str, str] = {}  # the user's phase -> the phase that writes its samples
    # the user's phase -> (its evaluation, the phase whose model is evaluated)
    evaluated: dict[str, tuple[str, str | None]] = {}
    for phase in phases:
        config = compose(phase)
        method = config.method
        phase_rules.check_sources(phase, method, models, samples)
        phase_rules.check_results(phase, models, evaluated)
        name, model_from = phase.name, phase.model_from and models[phase.model_from]
        if method.has_cycles:
            if phase.results_from is not None:
                raise UserError(
                    f"phases: {name} has results_from, but method=raft writes no model card. "
                    "Remove results_from."
                )
            if phase.optional:
                raise UserError(
                    f"phases: {name} is optional, but the cycles of method=raft need each other. "
                    "Remove its key optional."
                )
            raft = raft_phases(config, name, model_from, phase.overrides)
            evaluations = [part.name for part in raft if part.part == "evaluate"]
            ended = itertools.takewhile(accuracies.__contains__, evaluations)
            known = [accuracies[evaluation] for evaluation in ended]
            choice = choose(name, method.selection, known, int(value(config, "cycles")))
            if choice.selection.metric is not None:
                for part in raft:
                    part.chosen = choice
            names = {(part.part, part.cycle): part.name for part in raft}
            expanded += raft
            models[name] = names["train", choice.cycle]
            samples[name] = names["sample", choice.last]
            if evaluation := names.get(("evaluate", choice.cycle)):
                evaluated[name] = evaluation, models[name]
            continue
        data_from = phase.data_from and samples[phase.data_from]
        results_from = phase.results_from and evaluated[phase.results_from][0]
        expanded.append(Phase(name, phase.overrides, model_from, data_from, results_from))
        if (method.trains or method.exports) and config.save_model:
            models[name] = name
        if method.leaves_samples:
            samples[name] = name
        if method.measures_model:
            evaluated[name] = name, model_from
    return expanded


def raft_phases(
    config: Config, prefix: str, model_from: str | None, overrides: Sequence[str]
) -> list[CyclePhase]:
    """Return the phases of a composition with method=raft. smoke=true was already applied.

    `model_from` is the phase whose model generates the first samples. If it is None, the
    composition's model does.
    """
    args = {name: value(config, name) for name in class_arguments(config)}
    verifier = {name: getattr(config.method, name) for name in VERIFIER}
    several = (config.topology.num_gpus or config.hardware.gpus_per_node) > 1
    # Sampling and evaluating use one GPU, or a replica on each GPU.
    inference = "ddp" if several and config.topology.name != "single" else "single"
    phases: list[CyclePhase] = []

    def add(part: str, cycle: int, **fields: Any) -> str:
        name = phase_name(prefix, cycle, part)
        if part == "start":
            name = f"{prefix}_start" if prefix else "start"
        phase = CyclePhase(name, without_method(overrides), part=part, cycle=cycle, **fields)
        phase.args, phase.smoke_keeps = dict(args[part]), part_keys(part, config.smoke_keeps)
        phase.groups = [f"method={METHODS[part]}"]
        if part in ("sample", "evaluate"):
            phase.groups.append(f"topology={inference}")
            phase.verifier = verifier
        phases.append(phase)
        return name

    base = model_from
    is_random = config.model.path is None and (config.model.init == Init.random or config.smoke)
    if base is None and is_random:
        base = add("start", 0)  # random weights solve no problem and have no tokenizer
    newest, samples = base, None
    evaluates = config.data.has_heldout
    if evaluates:
        add("evaluate", 0, model_from=base)
    for cycle in range(1, int(args["cycles"]) + 1):
        samples = add("sample", cycle, model_from=newest, pass_rates_from=samples)
        phases[-1].args |= {"cycle": cycle, "num_cycles": args["cycles"]}
        newest = add(
            "train",
            cycle,
            model_from=newest if args["base"] == "continued" else base,
            data_from=samples,
            learning_rate_factor=float(args["learning_rate_decay"]) ** (cycle - 1),
        )
        if evaluates:
            add("evaluate", cycle, model_from=newest)
    return phases


def apply(config: Config, phase: CyclePhase) -> None:
    """Change a phase's composition in place for its part of the cycle.

    This removes arguments of method=raft, which an experiment's overrides may have added.
    """
    method, data, topology = config.method, config.data, config.topology
    raft_arguments = {"cycles", "base", "learning_rate_decay", *METHODS}
    method.args = {n: arg for n, arg in method.args.items() if n not in raft_arguments} | phase.args
    method.selection = Selection()  # method.selection of RAFT chooses a cycle
    for name in VERIFIER:
        setattr(method, name, phase.verifier.get(name, getattr(Method(), name)))
    config.smoke_keeps = sorted({*config.smoke_keeps, *phase.smoke_keeps})
    names = {f"method.args.{name}" for name in phase.args}
    config.speed_keeps = sorted({*config.speed_keeps, *names})
    if phase.part != "sample":  # only sampling has a curriculum
        data.curriculum, data.curriculum_args = Curriculum.none, CurriculumArgs()
        data.pass_rates = None
    if method.args.get("engine") != "vllm":  # these keys are for another phase's vLLM
        for key in SERVER_KEYS:
            setattr(topology, key, getattr(Topology(), key))
    if phase.part in ("sample", "evaluate"):  # these methods reject settings of training
        config.effective_batch, config.adapter = None, Adapter("none")
        read_keys = ("name", "num_gpus", "strategy", "numa_binding", *SERVER_KEYS)
        config.topology = Topology(**{key: getattr(topology, key) for key in read_keys})
    elif phase.learning_rate_factor != 1.0:
        rate = float(value(config, "learning_rate"))
        method.args["learning_rate"] = rate * phase.learning_rate_factor


def samples_data(folder: Path, config: Config) -> Data:
    """Return data settings that load the samples in `folder`: the selected ones, or DPO's pairs.

    The chat template, cache and pairing come from the composition.
    """
    kind, file, keys = "jsonl", SELECTED, ["chat_template", "cache"]
    if config.method.rows == "dpo":
        kind, file, keys = "samples", SCORED, [*keys, "pairs_per_prompt", "pairs_of_any"]
    values = {key: getattr(config.data, key) for key in keys}
    return Data(name=kind, kind=kind, path=str(folder / file), **values)


def without_method(overrides: Sequence[str]) -> list[str]:
    """Return the overrides except the method's, which RAFT passes to its phases itself."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("method=", "method."))]


def part_keys(part: str, keys: Iterable[str]) -> list[str]:
    """Return method.args.NAME for each method.args.<part>.NAME in `keys`."""
    prefix = f"method.args.{part}."
    return [f"method.args.{key.removeprefix(prefix)}" for key in keys if key.startswith(prefix)]
