"""speed=auto: choose settings that make a training step faster without changing its result.

Keys that the user set (config.speed_keeps) or a hardware file sets are never changed. Of the
settings whose predicted memory fits with the planner's own error to spare, those with the most
predicted tokens per second are taken. Everything here is a pure function of a checked composition
(launch/plan/planning.py, prepare). A candidate is a modified copy, never a new composition.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from launch.config.compose import leaf
from launch.config.unchanging import divides_evenly, why
from launch.estimate import margin, memory
from launch.estimate.batch_counts import PROMPT, batch
from launch.estimate.speed import COMPILE_S, num_steps, speed
from launch.machine import placement
from launch.machine.detect import Host
from launch.schema import Choice, Config
from launch.schema.enums import Rows, Speed, Vendor
from launch.schema.trainer_args import argument

BATCH, ACCUMULATION = (
    "method.args.per_device_train_batch_size",
    "method.args.gradient_accumulation_steps",
)
OF_A_BATCH = (BATCH, ACCUMULATION)
CHECKPOINTING, LAYERS = "method.args.gradient_checkpointing", "step.checkpointed_layers"
COMPILE, ROWS, WORKERS = "step.compile", "step.rows", "hardware.dataloader.num_workers"
GAIN = 1.02  # least gain that changes a setting; smaller gains are within the formula's own error
MOST_ROWS = 64  # rows of the largest micro-batch tried: more do not fill a GPU any better
# loader workers of a rank; 4 is the default in conf/hardware/base/common.yaml
FEWEST_WORKERS, MOST_WORKERS = (1, 4)
PLAIN = "TRL's default, which speed=off and tuning runs keep"
# Prompt tokens that GRPO's memory must leave room for if prompts have no limit: four times what
# batch() counts.
PROMPT_TOKENS = 1024


def choose(config: Config, host: Host) -> Config:
    """Return `config` with every choice made and listed in `chosen`; keys listed there stay."""
    if not (config.method.trains or config.method.tunes):
        return config
    off = config.speed == Speed.off or config.method.tunes
    config = _with_choice(config, COMPILE, *_compile(config, off))
    config = _with_choice(config, ROWS, *((Rows.padded, PLAIN) if off else _rows(config)))
    if off or config.smoke:
        return config
    config = _with_workers(config, host)
    if config.hardware.vendor == Vendor.none or speed(config).step_s is None:
        return config
    return _sized(_worth_compiling(config), host)


def _in_turn(config: Config) -> Config:
    """Return a copy whose generation and training take turns.

    When they overlap, one hides the other. Predictions are too rough to tell which, so neither is
    slowed.
    """
    return with_value(config, "topology.overlap", False)


def apply(config: Config, choices: list[Choice]) -> Config:
    """Return `config` with the choices of a record; keys that the user sets now stay."""
    for choice in choices:
        is_name = choice.key == ROWS and isinstance(choice.value, str)
        value = Rows[choice.value] if is_name else choice.value
        config = _with_choice(config, choice.key, value, choice.reason)
    return config


def without_choices(config: Config) -> Config:
    """Return the composition as it was before any choice."""
    for choice in reversed(config.chosen):
        config = with_value(config, choice.key, choice.before)
    return dataclasses.replace(config, chosen=[])


def with_value(config: Config, key: str, value: Any) -> Config:
    """Return a copy with `value` at a dotted key; None removes an argument of the method."""
    group, *rest = key.split(".")
    return dataclasses.replace(config, **{group: _with(getattr(config, group), rest, value)})


def _with(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(node, dict):
        others = {key: item for key, item in node.items() if key != name}
        return {**node, name: value} if value is not None else others
    return dataclasses.replace(
        node, **{name: _with(getattr(node, name), rest, value) if rest else value}
    )


def _is_free(config: Config, key: str) -> bool:
    """Return whether neither the user nor an earlier choice set the key."""
    taken = {*config.speed_keeps, *(choice.key for choice in config.chosen)}
    return key not in taken and not (key.startswith("step.") and leaf(config, key) is not None)


def _with_choice(config: Config, key: str, value: Any, reason: str) -> Config:
    """Return `config` with the choice, unless the key is not free or already has the value."""
    before = leaf(config, key)
    if not _is_free(config, key) or before == value:
        return config
    choice = Choice(key, value.name if isinstance(value, Rows) else value, reason, before)
    return dataclasses.replace(with_value(config, key, value), chosen=[*config.chosen, choice])


def _compile(config: Config, off: bool) -> tuple[bool, str]:
    """Return whether to compile each layer, and why.

    A reason that forbids compiling outweighs all others.
    """
    eager = why("eager", config)
    if eager:
        return False, eager
    if config.precision.compute == "fp8":
        return True, "precision=fp8 takes three times as long as bf16 without it"
    if off:
        return False, PLAIN
    checked = (
        ""
        if config.hardware.compile_measured
        else f"; not measured on {config.hardware.name}: the first micro-batch checks it"
    )
    return True, f"fewer, larger kernels{checked}"


def _rows(config: Config) -> tuple[Rows, str]:
    padded = why("padded", config)
    if padded:
        return Rows.padded, padded
    generates = config.method.generates
    grouped = "rows of similar length share a micro-batch"
    if generates:
        grouped = "each micro-batch is padded to its own longest completion"
    if Rows.packed not in config.method.row_layouts:
        return Rows.grouped, f"{grouped}, within one optimizer step"
    apart = why("apart", config)
    if apart:
        return Rows.grouped, f"{apart}; {grouped}"
    what = "completions of a micro-batch" if generates else "rows of a step"
    return (
        Rows.packed,
        f"packing the {what} removes padding; {config.hardware.packed_attention} respects "
        "their boundaries",
    )


def _with_workers(config: Config, host: Host) -> Config:
    """Return `config` with fewer loader workers if it trains here and this host has few cores."""
    workers, ranks = config.hardware.dataloader.num_workers, placement.trainers_of_a_node(config)
    if config.data.streaming or not workers or not host.gpus_of(config.hardware.vendor):
        return config  # with streamed rows, the number of workers decides their order
    spare = max(FEWEST_WORKERS, min(MOST_WORKERS, host.num_cores // ranks - 1))
    reason = f"{host.num_cores} cores for {ranks} rank(s)"
    return _with_choice(config, WORKERS, spare, reason) if spare < workers else config


def _sized(config: Config, host: Host) -> Config:
    """Choose the micro-batch and checkpointing that fit and are predicted fastest."""
    processes = placement.process_groups(config, host)
    smaller = memory.measured(config, processes, host)

    def fits(candidate: Config) -> bool:
        entries = memory.memory(_longest_prompts(candidate), processes, smaller)
        return all(entry.fits and not margin.close(entry) for entry in entries)

    def rate_of(candidate: Config) -> float:
        return speed(_in_turn(candidate)).tokens_per_second or 0.0

    best, most, fitted = config, rate_of(config) * GAIN, fits(config)
    for candidate in _candidates(config, fits):
        rate = rate_of(candidate)
        if rate > most or not fitted:  # any candidate that fits beats one that does not
            best, most, fitted = candidate, rate * GAIN, True
    return _listed(config, best)


def _candidates(config: Config, fits: Any) -> Iterator[Config]:
    """Yield each micro-batch that fits, with as few recomputed layers as possible."""
    for sized in _batches(config):
        if (
            not _is_free(config, CHECKPOINTING)
            or not _is_free(config, LAYERS)
            or why("checkpointing", config)
        ):
            yield from [sized] if fits(sized) else []
            continue

        def fits_with(layers: int, sized: Config = sized) -> bool:
            return bool(fits(_recomputing(sized, layers)))

        layers = range(config.model.num_layers + 1)
        fewest = bisect.bisect_left(layers, True, key=fits_with)
        if fewest < len(layers):
            yield _recomputing(sized, fewest)


def _batches(config: Config) -> Iterator[Config]:
    """Yield every division of a step's sequences into micro-batches, the current one first."""
    yield config
    if why("batch", config) or not (_is_free(config, BATCH) and _is_free(config, ACCUMULATION)):
        return
    size = batch(config)
    rows = size.per_device * size.accumulation
    for n in range(1, min(rows, MOST_ROWS) + 1):
        if rows % n == 0 and n != size.per_device and divides_evenly(config, n):
            yield with_value(with_value(config, BATCH, n), ACCUMULATION, rows // n)


def _recomputing(config: Config, layers: int) -> Config:
    """Return a copy that checkpoints `layers` layers, from none to all of them."""
    some = layers if 0 < layers < config.model.num_layers else None
    return with_value(with_value(config, CHECKPOINTING, layers > 0), LAYERS, some)


def _longest_prompts(config: Config) -> Config:
    """Return a copy with longer completions, for prompts that exceed their planned length.

    The planned memory then covers them.
    """
    longest = argument(config, "max_completion_length")
    bounded = config.topology.server_max_length or argument(config, "vllm_max_model_length")
    has_short_prompts = config.data.kind in ("reasoning", "code")
    if not longest or bounded or has_short_prompts:
        return config
    tokens = int(longest) + PROMPT_TOKENS - PROMPT
    return with_value(config, "method.args.max_completion_length", tokens)


def _listed(config: Config, best: Config) -> Config:
    """Return `config` with the values of `best`, each with its reason and its predicted gain."""
    for reasons in (
        {
            BATCH: "the same sequences per step, in the fastest division that fits",
            ACCUMULATION: f"follows from {BATCH}",
        },
        {
            CHECKPOINTING: "the activations fit without it",
            LAYERS: "the fewest recomputed layers that fit",
        },
    ):
        changed = config
        for key in reasons:
            changed = with_value(changed, key, leaf(best, key))
        gain = _gain(speed(config).step_s, speed(changed).step_s)
        for key, reason in reasons.items():
            config = _with_choice(config, key, leaf(best, key), reason + gain)
    return config


def _gain(before_s: float | None, after_s: float | None) -> str:
    gain = round(before_s / after_s, 2) if before_s and after_s else 1.0
    return f"; predicted {gain:.2f}x" if gain > 1 else ""


def _worth_compiling(config: Config) -> Config:
    """Return `config`, eager if the run ends before compiling pays off."""
    compiles = any(choice.key == COMPILE and choice.value for choice in config.chosen)
    if not compiles or config.precision.compute == "fp8":
        return config
    eager, steps = with_value(config, COMPILE, False), num_steps(config, batch(config))
    slow, fast = speed(_in_turn(eager)).step_s, speed(_in_turn(config)).step_s
    saved = slow - fast if slow and fast else 0.0
    pays = saved > 0 and (steps is None or steps * saved > COMPILE_S)
    why = "compiling gains nothing"
    if steps and saved > 0:
        why = f"{steps} steps save {steps * saved:.0f} s, but compiling takes {COMPILE_S:.0f} s"
    chosen = list(config.chosen)
    for i, choice in enumerate(chosen):
        if choice.key == COMPILE:
            reason = choice.reason + _gain(slow, fast) if pays else why
            chosen[i] = dataclasses.replace(choice, value=pays, reason=reason)
    return dataclasses.replace(config if pays else eager, chosen=chosen)


def recorded(content: Mapping[str, Any]) -> list[Choice]:
    """Return the choices in a recorded composition."""
    return [Choice(**choice) for choice in content.get("chosen", [])]
