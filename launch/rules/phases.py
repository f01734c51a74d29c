"""Reject wrong names, sources and overrides of a pipeline's phases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from launch.core.errors import UserError, near
from launch.schema import Method, Phase

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Keys that all phases share, and why a phase cannot have its own.
SHARED = {
    "experiment": "an experiment is of the whole pipeline",
    "mode": "a pipeline is planned or run as a whole",
    "resume": "a pipeline goes on as a whole, at the phase that it stopped in",
    "phases": "a phase has no phases",
    "name": "it names the pipeline's directory, and each phase's follows from it",
    "run_root": "every phase's directory lies in the pipeline's",
    "smoke": "phases hand models on, and a small one is no start for a large one",
    "format": "a pipeline prints one plan",
    "verbose": "a pipeline prints one plan",
    "find": "it searches for one run",
    "sweep": "a sweep is of whole pipelines (-m)",
    "hardware": "all phases run on this machine",
    "hydra": "it configures the program",
}
# Keys of the model or the data that a phase takes from an earlier one. It may still set how rows
# are written.
OF_MODEL = re.compile(r"model(\.(path|hub_id|revision|init))?")
OF_DATA = re.compile(r"data(\.(?!(chat_template|cache|pairs_per_prompt|pairs_of_any)$).*)?")


def check_phases(phases: list[Phase]) -> None:
    """Raise UserError for wrong names, sources or overrides in the phases as the user wrote them.

    `check_taken` checks what needs a composition.
    """
    names = [phase.name for phase in phases]
    for number, phase in enumerate(phases, start=1):
        if not phase.name.strip():
            raise UserError(
                f"phases: number {number} has an empty name. Give it one: name=<letters, "
                "digits, '.', '_' and '-'>."
            )
        if not NAME.fullmatch(phase.name):
            raise UserError(
                f"phases: name={phase.name} names a directory. Use: letters, digits, '.', '_' "
                "and '-', at most 100 of them."
            )
        if names.count(phase.name) > 1:
            raise UserError(f"phases: two are called {phase.name}. Give each a name of its own.")
        for key, taken in (("model_from", phase.model_from), ("data_from", phase.data_from)):
            if taken is not None:
                _check_before(phase, key, taken, names[: number - 1], names[number:])
        for override in phase.overrides:
            _check_override(phase, override)


def _check_before(phase: Phase, key: str, taken: str, before: list[str], after: list[str]) -> None:
    if taken in before:
        return
    if taken == phase.name:
        why = "is that phase itself."
    elif taken in after:
        why = "comes after it."
    else:
        why = f"names no phase.{near(taken, [*before, *after])}"
    raise UserError(
        f"phases: {key}={taken} of {phase.name} {why} Phases before it: "
        f"{', '.join(before) or 'none'}."
    )


def _check_override(phase: Phase, override: object) -> None:
    where = f"phases: override {override} of {phase.name}"
    if not isinstance(override, str):
        raise UserError(
            f"{where}: a mapping, where a list of key=value is meant. Use: quotes around it "
            "where a character is special."
        )
    key = re.split(r"[=@]", override.lstrip("+~"), maxsplit=1)[0].strip()
    if "=" not in override and not override.startswith("~"):
        raise UserError(f"{where}: no '=' in it. An override is key=value or group=option.")
    first = re.split(r"[./]", key)[0]
    # A phase may have its own value of some hardware keys, such as dataloader workers.
    if first in SHARED and not (first == "hardware" and key != first):
        raise UserError(
            f"{where}: {SHARED[first]}. Use: {key}=... on the command line or in the "
            "experiment, outside phases."
        )
    for taken, name, of in (
        ("model_from", phase.model_from, OF_MODEL),
        ("data_from", phase.data_from, OF_DATA),
    ):
        if name is not None and of.fullmatch(key):
            raise UserError(
                f"{where}: {taken}={name} decides it, and the override would be ignored. Leave "
                "out one of the two."
            )


def check_taken(phase: Phase, models: Mapping[str, str], samples: Mapping[str, str]) -> None:
    """Raise UserError if a phase takes a model or samples that no earlier phase leaves.

    `models` and `samples` hold the earlier phases that leave one.
    """
    if phase.model_from is not None and phase.model_from not in models:
        raise UserError(
            f"phases: model_from={phase.model_from} of {phase.name}: that phase trains no model. "
            f"Phases before that do: {', '.join(models) or 'none'}."
        )
    if phase.data_from is not None and phase.data_from not in samples:
        raise UserError(
            f"phases: data_from={phase.data_from} of {phase.name}: that phase leaves no samples. "
            f"Phases before of method=sample or raft: {', '.join(samples) or 'none'}."
        )


def check_used(phase: Phase, method: Method) -> None:
    """Raise UserError if the phase's method does not use what the phase takes."""
    where = f"of {phase.name}: method={method.name}"
    if phase.data_from is not None and not method.trains:
        raise UserError(
            f"phases: data_from={phase.data_from} {where} trains on no samples of another "
            "phase. Use: method=sft, dpo or grpo."
        )
    if phase.model_from is not None and not method.uses_model:
        raise UserError(
            f"phases: model_from={phase.model_from} {where} reads no model, and would ignore "
            "it. Leave it out."
        )


def check_results(
    phase: Phase, models: Mapping[str, str], evaluated: Mapping[str, tuple[str, str | None]]
) -> None:
    """Raise UserError if a model card would quote another model's evaluation, or none."""
    wanted = phase.results_from
    if wanted is None:
        return
    if wanted not in evaluated:
        known = ", ".join(evaluated) or "none"
        raise UserError(
            f"phases: results_from={wanted} of {phase.name} names no evaluation before it. "
            f"Evaluations before: {known}."
        )
    measured, exported = evaluated[wanted][1], models.get(phase.model_from or "")
    if measured != exported:
        raise UserError(
            f"phases: results_from={wanted} of {phase.name} measured the model of {measured}, "
            f"and not that of {phase.model_from}. "
            "Use: an evaluation of the model that is exported."
        )


def check_expanded(names: Iterable[str]) -> None:
    """Raise UserError if a name is used twice once the cycles of RAFT are phases too."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(
                f"phases: {name} is also the name of a phase that method=raft makes. Give "
                "yours another."
            )
        seen.add(name)
