"""RAFT as phases of a pipeline: for each cycle samples, a training on the best of them, and an evaluation. Pure functions.

What a phase does stands in conf/method/ of its own method; what RAFT adds to that, in args.sample, train and evaluate of method=raft.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.pipelines.cycle_choice import Choice, OfCycle, choose, phase_name
from launch.rules import phases as phase_rules
from launch.rules.selection import has_heldout
from launch.schema import Adapter, Config, Data, Method, Phase, Topology
from launch.schema.data import Curriculum, CurriculumArgs, Selection
from launch.schema.enums import Init
from launch.trainer_args import own, value

SELECTED, SCORED = "selected.jsonl", "scored.jsonl"  # what recipes/sample.py leaves for trainings
VERIFIER = ("rewards", "reward_chain", "reward_pattern", "reward_confined", "sandbox")
METHODS = {"start": "sft", "sample": "sample", "train": "sft", "evaluate": "evaluate"}


@dataclass
class CyclePhase(Phase):
    """A phase that RAFT stands for."""

    part: str = "sample"  # or train, evaluate, start
    cycle: int = 0  # before the first
    chosen: OfCycle | None = None  # where method.selection is asked for
    groups: list[str] = field(default_factory=list)  # options that its part decides, whatever the command line says
    args: dict[str, Any] = field(default_factory=dict)  # of its method, on top of what it composes to
    verifier: dict[str, Any] = field(default_factory=dict)  # keys of its method that say how completions are judged
    learning_rate_factor: float = 1.0
    pass_rates_from: str | None = None  # the samples of the cycle before
    smoke_keeps: list[str] = field(default_factory=list)  # arguments that the command line gives for its part


def expand(phases: list[Phase], compose: Callable[[Phase], Config], accuracies: Mapping[str, float]) -> list[Phase]:
    """`phases` with each of method=raft replaced by those of its cycles; `model_from` of later ones follows.

    `compose` gives a phase's composition, `accuracies` what evaluations have found by now. Raises UserError for what rules/phases.py
    refuses.
    """
    found: list[Phase] = []
    models: dict[str, str] = {}  # phase as it was given -> the phase that leaves its model; those that leave none are not in it
    samples: dict[str, str] = {}  # the same, of its samples
    evaluated: dict[str, tuple[str, str | None]] = {}  # the same, of its last evaluation, with the phase whose model that measured
    for phase in phases:
        phase_rules.check_taken(phase, models, samples)
        phase_rules.check_results(phase, models, evaluated)
        config = compose(phase)
        phase_rules.check_used(phase, config.method)
        if config.method.kind != "cycles":
            found.append(_following(phase, models, samples))
            if phase.results_from is not None:
                found[-1].results_from = evaluated[phase.results_from][0]
            evaluated |= {phase.name: (phase.name, found[-1].model_from)} if config.method.name == "evaluate" else {}
            models |= {phase.name: phase.name} if config.method.kind in ("trainer", "exporter") and config.save_model else {}
            samples |= {phase.name: phase.name} if config.method.name == "sample" else {}
            continue
        if phase.results_from is not None:
            raise UserError(f"phases: results_from of {phase.name}: method=raft writes no model card, and would ignore it. Leave it out.")
        made = of_raft(config, phase.name, models[phase.model_from] if phase.model_from else None, phase.overrides)
        found += made
        choice = _choose(made, config, phase.name, accuracies)
        at = {(p.part, p.cycle): p.name for p in made}
        models[phase.name], samples[phase.name] = at["train", choice.cycle], at["sample", choice.last]
        evaluated |= {phase.name: (at["evaluate", choice.cycle], models[phase.name])} if ("evaluate", 0) in at else {}
    phase_rules.check_expanded(phase.name for phase in found)
    return found


def _choose(made: list[CyclePhase], config: Config, phase: str, accuracies: Mapping[str, float]) -> Choice:
    """Which cycle of a RAFT is its result, as far as that is known; its phases are told, where they were to choose."""
    evaluations = [p.name for p in made if p.part == "evaluate"]
    known = [accuracies[name] for name in itertools.takewhile(accuracies.__contains__, evaluations)]
    choice = choose(phase, config.method.selection, known, int(value(config, "cycles")))
    for p in made:
        p.chosen = OfCycle(p.cycle, choice) if choice.selection.metric is not None else None
    return choice


def of_raft(config: Config, prefix: str, model_from: str | None, overrides: list[str]) -> list[CyclePhase]:
    """The phases of a composition of method=raft, smoke=true applied. `model_from` leaves the model that is sampled first, if one does."""
    raft = {name: value(config, name) for name in own(config)}
    kept = without_method(overrides)
    found: list[CyclePhase] = []

    def add(part: str, cycle: int, **fields: Any) -> str:
        name = phase_name(prefix, cycle, part) if part != "start" else f"{prefix}_start" if prefix else "start"
        found.append(CyclePhase(name, kept, part=part, cycle=cycle, groups=_groups(config, part), args=dict(raft[part]), **fields))
        found[-1].smoke_keeps = of_part(part, config.smoke_keeps)
        return name

    base = model_from
    if base is None and config.model.path is None and (config.model.init == Init.random or config.smoke):
        base = add("start", 0)  # random weights get nothing right, and have no tokenizer to hand on
    newest, samples = base, None
    verifier = {name: getattr(config.method, name) for name in VERIFIER}
    measured = has_heldout(config)
    if measured:
        add("evaluate", 0, model_from=base, verifier=verifier)
    for cycle in range(1, int(raft["cycles"]) + 1):
        samples = add("sample", cycle, model_from=newest, verifier=verifier, pass_rates_from=samples)
        found[-1].args |= {"cycle": cycle, "num_cycles": raft["cycles"]}
        starts = newest if raft["base"] == "continued" else base
        factor = float(raft["learning_rate_decay"]) ** (cycle - 1)
        newest = add("train", cycle, model_from=starts, data_from=samples, learning_rate_factor=factor)
        if measured:
            add("evaluate", cycle, model_from=newest, verifier=verifier)
    return found


def apply(config: Config, phase: CyclePhase) -> None:
    """Turn the composition of a phase into that of its part. An experiment's own keys for method=raft stand in it too, and go."""
    of_raft = {"cycles", "base", "learning_rate_decay", *METHODS}
    config.method.args = {name: given for name, given in config.method.args.items() if name not in of_raft} | phase.args
    config.method.selection = Selection()  # RAFT's own is of its cycles
    config.smoke_keeps = sorted({*config.smoke_keeps, *phase.smoke_keeps})
    config.speed_keeps = sorted({*config.speed_keeps, *(f"method.args.{name}" for name in phase.args)})
    for name in VERIFIER:
        setattr(config.method, name, phase.verifier.get(name, getattr(Method(), name)))
    if phase.part != "sample":  # a curriculum is of the prompts that are sampled
        config.data.curriculum, config.data.curriculum_args, config.data.pass_rates = Curriculum.none, CurriculumArgs(), None
    given = config.topology
    if config.method.args.get("engine") != "vllm":  # RAFT was given them for the vLLM of another phase
        given.server_memory_share, given.server_cache_gb, given.server_args = Topology.server_memory_share, None, {}
    if phase.part in ("sample", "evaluate"):  # what says how to train says nothing to them
        config.effective_batch, config.adapter = None, Adapter("none")
        config.topology = Topology(
            given.name,
            given.num_gpus,
            given.strategy,
            server_memory_share=given.server_memory_share,
            server_cache_gb=given.server_cache_gb,
            server_args=given.server_args,
            numa_binding=given.numa_binding,
        )
    elif phase.learning_rate_factor != 1.0:
        config.method.args["learning_rate"] = float(value(config, "learning_rate")) * phase.learning_rate_factor


def samples_of(folder: Path, config: Config) -> Data:
    """The data of a training on the samples that a phase leaves in `folder`: the selected ones, for DPO pairs of all.

    How rows are written and kept, and how many pairs are made, is as in the composition's own data.
    """
    given = config.data
    kept: dict[str, Any] = {"chat_template": given.chat_template, "cache": given.cache}
    if config.method.name == "dpo":
        pairs: dict[str, Any] = {"pairs_per_prompt": given.pairs_per_prompt, "pairs_of_any": given.pairs_of_any}
        return Data(name="samples", kind="samples", path=str(folder / SCORED), **pairs, **kept)
    return Data(name="jsonl", kind="jsonl", path=str(folder / SELECTED), **kept)


def without_method(overrides: list[str]) -> list[str]:
    """Overrides of everything but the method, whose arguments RAFT hands to its phases itself."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("method=", "method."))]


def of_part(part: str, keys: Iterable[str]) -> list[str]:
    """method.args.NAME for each method.args.<part>.NAME among the keys: what the phase knows it by."""
    own = f"method.args.{part}."
    return [f"method.args.{key.removeprefix(own)}" for key in keys if key.startswith(own)]


def _groups(config: Config, part: str) -> list[str]:
    """Groups of a part that are not RAFT's own: one that trains nothing takes one GPU, or a replica on each."""
    found = [f"method={METHODS[part]}"]
    if part in ("start", "train"):
        return found
    several = (config.topology.num_gpus or config.hardware.gpus_per_node) > 1 and config.topology.name != "single"
    return [*found, "topology=ddp"] if several else [*found, "topology=single"]


def _following(phase: Phase, models: Mapping[str, str], samples: Mapping[str, str]) -> Phase:
    """The phase itself; what it takes from method=raft, it takes from the training that is its result, or the last samples."""
    model_from = models[phase.model_from] if phase.model_from is not None else None
    data_from = samples[phase.data_from] if phase.data_from is not None else None
    return Phase(phase.name, phase.overrides, model_from, data_from)
