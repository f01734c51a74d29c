"""Reject wrong names, sources and overrides of a pipeline's phases."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launch.config.request import Request
from launch.core.errors import UserError, near
from launch.rules.values import check_value
from launch.schema import Method, Phase
from launch.schema.checked import NAME

# Keys that all phases share, and why a phase cannot override them.
SHARED = {
    "experiment": "an experiment describes the whole pipeline",
    "mode": "a pipeline is planned or run as one",
    "resume": "a pipeline resumes at its unfinished phase",
    "phases": "a phase cannot have phases",
    "name": "it determines the directories of the pipeline and of its phases",
    "run_root": "the phases' directories are in the pipeline's directory",
    "smoke": "phases pass on their models, so all must have the same size",
    "format": "a pipeline prints one plan",
    "verbose": "a pipeline prints one plan",
    "find": "a search is for a single run",
    "sweep": "a sweep varies whole pipelines (-m)",
    "hardware": "all phases run on this machine",
    "hydra": "it configures the launcher",
}
# Keys that model_from and data_from set. A phase may still set how rows are formatted.
OF_MODEL = re.compile(r"model(\.(path|hub_id|revision|init))?")
OF_DATA = re.compile(r"data(\.(?!(chat_template|cache|pairs_per_prompt|pairs_of_any)$).*)?")


def check_phases(phases: list[Phase]) -> None:
    """Raise UserError for wrong names, sources or overrides of phases.

    `check_sources` checks the sources again once a phase is composed.
    """
    names = [phase.name for phase in phases]
    for number, phase in enumerate(phases):
        check_value("phases: name", phase.name, NAME)
        earlier = names[:number]
        if phase.name in earlier:
            raise UserError(f"phases: two phases are named {phase.name}. Rename one of them.")
        for key, source in (("model_from", phase.model_from), ("data_from", phase.data_from)):
            if source is not None and source not in earlier:
                why = "is not an earlier phase" if source in names else "is not a phase"
                raise UserError(
                    f"phases: {key}={source} of {phase.name} {why}.{near(source, earlier)} "
                    f"Earlier phases: {', '.join(earlier) or 'none'}."
                )
            if any(other.name == source and other.optional for other in phases):
                raise UserError(
                    f"phases: {key}={source} of {phase.name}: {source} is optional, so it may "
                    "leave nothing. Remove its key optional."
                )
        for override in phase.overrides:
            if problem := _override_problem(phase, override):
                raise UserError(f"phases: override {override} of {phase.name}: {problem}")


def _override_problem(phase: Phase, override: object) -> str | None:
    if not isinstance(override, str):
        return "it must be text, key=value. Use: quotes around it if it has special characters."
    try:
        [parsed] = Request([override]).parsed
    except UserError as error:
        return str(error)
    key = str(parsed.key_or_group)
    first = re.split(r"[./]", key)[0]
    # A phase may override some hardware keys, such as dataloader workers.
    if first in SHARED and not (first == "hardware" and key != first):
        return (
            f"{SHARED[first]}. Use: {key}=... on the command line or in the experiment, outside "
            "phases."
        )
    for name, source, keys in (
        ("model_from", phase.model_from, OF_MODEL),
        ("data_from", phase.data_from, OF_DATA),
    ):
        if source is not None and keys.fullmatch(key):
            return f"{name}={source} sets the same key. Leave out one of them."
    return None


def check_sources(
    phase: Phase, method: Method, models: Mapping[str, str], samples: Mapping[str, str]
) -> None:
    """Raise UserError if no earlier phase produces a phase's input, or its method ignores it.

    The keys of `models` and `samples` are the earlier phases that produce them.
    """
    for key, source, producers, is_read, remedy in (
        ("model_from", phase.model_from, models, method.uses_model, "Leave it out"),
        ("data_from", phase.data_from, samples, method.trains, "Use: method=sft, dpo or grpo"),
    ):
        if source is None:
            continue
        why = "" if is_read else f"method={method.name} does not read it. {remedy}"
        if source not in producers:
            kind, names = key.removesuffix("_from"), ", ".join(producers) or "none"
            why = f"that phase produces no {kind}. Earlier phases that do: {names}"
        if why:
            raise UserError(f"phases: {key}={source} of {phase.name}: {why}.")


def check_results(
    phase: Phase, models: Mapping[str, str], evaluated: Mapping[str, tuple[str, str | None]]
) -> None:
    """Raise UserError unless results_from is an evaluation of the model that a phase exports."""
    source = phase.results_from
    if source is None:
        return
    measured, exported = evaluated.get(source, ("", None))[1], models.get(phase.model_from or "")
    if source not in evaluated or measured != exported:
        raise UserError(
            f"phases: results_from={source} of {phase.name} is not an evaluation of the model of "
            f"{phase.model_from}. Earlier evaluations: {', '.join(evaluated) or 'none'}."
        )
