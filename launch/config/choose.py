"""Choose settings for speed=auto that make a training step faster without changing its result.

The keys in config.speed_keeps, which the user or a file sets, are never changed. A candidate must
fit in memory even if the prediction is too low by the planner's usual error. Among the candidates,
the highest predicted throughput wins, unless a slightly slower one leaves room for the worst error
that was published. All functions are pure: they modify copies of a composition that `prepare` in
launch/plan/planning.py has checked.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launch.config.compose import leaf
from launch.config.fixed_settings import divides_evenly, reason_to_keep
from launch.estimate import margin, memory
from launch.estimate.batch_counts import PROMPT_TOKENS, batch
from launch.estimate.run_length import num_steps
from launch.estimate.speed import COMPILE_S, estimate_speed
from launch.machine import placement
from launch.machine.detect import Host
from launch.schema import Choice, Config
from launch.schema.enums import Rows, SpeedMode, Vendor
from launch.schema.trainer_args import value_or_none

BATCH, ACCUMULATION = (
    "method.args.per_device_train_batch_size",
    "method.args.gradient_accumulation_steps",
)
BATCH_KEYS = (BATCH, ACCUMULATION)
CHECKPOINTING, LAYERS = "method.args.gradient_checkpointing", "step.checkpointed_layers"
RESHARD = "topology.fsdp.reshard_after_forward"
COMPILE, ROWS, WORKERS = "step.compile", "step.rows", "hardware.dataloader.num_workers"
MIN_GAIN = 1.02  # smaller predicted gains are within the error of the formula
MAX_CAUTION = 1.1  # slowdown to fit in memory even if the plan errs as the worst published one did
WAITS = 3.0  # times; predictions are too rough to tell which of two similar times is longer
MAX_ROWS = 64  # of a micro-batch; larger ones do not use a GPU better
# loader workers of a rank; 4 is the default in conf/hardware/base/common.yaml
MIN_WORKERS, MAX_WORKERS = (1, 4)
TRL_DEFAULT = "TRL's default, which speed=off and tuning runs keep"
# Longest prompt that must fit in GRPO's memory if prompts have no limit. batch() assumes a quarter.
MAX_PROMPT_TOKENS = 1024


def choose(config: Config, host: Host) -> Config:
    """Return `config` with all choices made and listed in `chosen`. Keys already listed stay."""
    if not (config.method.trains or config.method.tunes):
        return config
    off = config.speed == SpeedMode.off or config.method.tunes
    config = _with_choice(config, COMPILE, *_compile_choice(config, off))
    layout = (Rows.padded, TRL_DEFAULT) if off else _rows_choice(config)
    config = _with_choice(config, ROWS, *layout)
    if off or config.smoke:
        return config
    config = _with_workers(config, host)
    if config.hardware.vendor == Vendor.none or estimate_speed(config).step_s is None:
        return config
    return _with_fastest_batch(_without_slow_compile(config), host)


def _without_overlap(config: Config) -> Config:
    """Return a copy without overlap of generation and training.

    With overlap only the longer of the two would count, and predictions are too rough to tell which
    is longer, so a choice must not slow either (see _trainers_wait for times that differ more).
    """
    return with_value(config, "topology.overlap", False)


def apply(config: Config, choices: list[Choice]) -> Config:
    """Return `config` with the choices of a record, except for keys that the user now sets."""
    for choice in choices:
        is_name = choice.key == ROWS and isinstance(choice.value, str)
        value = Rows[choice.value] if is_name else choice.value
        config = _with_choice(config, choice.key, value, choice.reason)
    return config


def without_choices(config: Config) -> Config:
    """Return the composition without the choices of speed=auto."""
    for choice in reversed(config.chosen):
        config = with_value(config, choice.key, choice.before)
    return dataclasses.replace(config, chosen=[])


def with_value(config: Config, key: str, value: Any) -> Config:
    """Return a copy with `value` at a dotted key; None removes a key of a free mapping."""
    group, *rest = key.split(".")
    return dataclasses.replace(config, **{group: _with(getattr(config, group), rest, value)})


def _with(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(node, list):
        return [_with(each, rest, value) if str(n) == name else each for n, each in enumerate(node)]
    if isinstance(node, dict):
        others = {key: item for key, item in node.items() if key != name}
        return {**node, name: value} if value is not None else others
    return dataclasses.replace(
        node, **{name: _with(getattr(node, name), rest, value) if rest else value}
    )


def _is_free(config: Config, key: str) -> bool:
    """Return whether the key is still open: neither set by the user or a file nor chosen."""
    if key in {choice.key for choice in config.chosen}:
        return False
    return leaf(config, key) is None if key.startswith("step.") else key not in config.speed_keeps


def _with_choice(config: Config, key: str, value: Any, reason: str) -> Config:
    """Return `config` with a choice added if the key is free and has another value."""
    before = leaf(config, key)
    if not _is_free(config, key) or before == value:
        return config
    choice = Choice(key, value.name if isinstance(value, Rows) else value, reason, before)
    return dataclasses.replace(with_value(config, key, value), chosen=[*config.chosen, choice])


def _compile_choice(config: Config, off: bool) -> tuple[bool, str]:
    """Return whether to compile each layer, and the reason.

    A reason that forbids compiling has priority over all others.
    """
    eager_reason = reason_to_keep("eager", config)
    if eager_reason:
        return False, eager_reason
    if config.precision.compute == "fp8":
        return True, "without it, precision=fp8 takes three times as long as bf16"
    if off:
        return False, TRL_DEFAULT
    note = f"; not measured on {config.hardware.name}, so the first micro-batch checks it"
    return True, f"fewer, larger kernels{'' if config.hardware.kernels_measured else note}"


def _rows_choice(config: Config) -> tuple[Rows, str]:
    """Return the layout of a step's rows, and the reason."""
    padded_reason = reason_to_keep("padded", config)
    if padded_reason:
        return Rows.padded, padded_reason
    generates = config.method.generates
    grouped_reason = "rows of similar length share a micro-batch"
    if generates:
        grouped_reason = "each micro-batch is padded to its longest completion"
    if Rows.packed not in config.method.row_layouts:
        return Rows.grouped, f"{grouped_reason}, within one optimizer step"
    unpacked_reason = reason_to_keep("unpacked", config)
    if unpacked_reason:
        return Rows.grouped, f"{unpacked_reason}; {grouped_reason}"
    rows = "completions of a micro-batch" if generates else "rows of a step"
    return (
        Rows.packed,
        f"packing the {rows} removes padding; {config.hardware.packed_attention} respects "
        "their boundaries",
    )


def _with_workers(config: Config, host: Host) -> Config:
    """Return `config` with fewer loader workers if this host has its GPUs but few cores."""
    workers, ranks = config.hardware.dataloader.num_workers, placement.trainers_of_a_node(config)
    if config.data.streaming or not workers or not host.gpus_of(config.hardware.vendor):
        return config  # the order of streamed rows depends on the number of workers
    available = max(MIN_WORKERS, min(MAX_WORKERS, host.num_cores // ranks - 1))
    reason = f"{host.num_cores} cores for {ranks} rank(s)"
    return _with_choice(config, WORKERS, available, reason) if available < workers else config


def _with_fastest_batch(config: Config, host: Host) -> Config:
    """Choose the micro-batch and checkpointing with the highest predicted speed that fit."""
    processes = placement.process_groups(config, host)
    smaller = memory.measured(config, processes, host)

    def fits(candidate: Config, at_worst: bool = False) -> bool:
        entries = memory.memory(_with_long_prompts(candidate), processes, smaller)
        planned = map(margin.at_worst, entries) if at_worst else entries
        return all(entry.fits and not margin.close(entry) for entry in planned)

    best, fits_at_worst = _fastest(config, fits), functools.partial(fits, at_worst=True)
    if not config.method.generates and not fits_at_worst(best):  # no published run generates
        cautious = _fastest(config, fits_at_worst)
        is_near = _tokens_per_second(cautious) * MAX_CAUTION >= _tokens_per_second(best)
        best = cautious if is_near and fits_at_worst(cautious) else best
    return _with_choices_of(config, best)


def _tokens_per_second(config: Config) -> float:
    return estimate_speed(_without_overlap(config)).tokens_per_second or 0.0


def _fastest(config: Config, fits: Callable[[Config], bool]) -> Config:
    """Return the fastest copy that fits; `config` if none does, or none is clearly faster."""
    is_fixed = bool(
        not _is_free(config, CHECKPOINTING)
        or not _is_free(config, LAYERS)
        or reason_to_keep("checkpointing", config)
        or _trainers_wait(config)
    )
    best, threshold, best_fits = config, _tokens_per_second(config) * MIN_GAIN, fits(config)
    for candidate in _candidates(config):
        fastest = candidate if is_fixed else _with_checkpointing(candidate, 0)
        if best_fits and _tokens_per_second(fastest) <= threshold:
            continue
        fitting = _with_fewest_recomputed(candidate, fits, is_fixed)
        rate = _tokens_per_second(fitting) if fitting else 0.0
        if fitting and (rate > threshold or not best_fits):
            best, threshold, best_fits = fitting, rate * MIN_GAIN, True
    return best


def _trainers_wait(config: Config) -> bool:
    """Return whether recomputation costs no time, because generation takes WAITS times as long."""
    speed, recomputes = estimate_speed(config), value_or_none(config, "gradient_checkpointing")
    if not recomputes or not config.topology.overlap or not speed.training_s:
        return False
    return (speed.generation_s or 0.0) >= WAITS * speed.training_s


def _with_fewest_recomputed(
    config: Config, fits: Callable[[Config], bool], is_fixed: bool
) -> Config | None:
    """Return a copy that fits with as few recomputed layers as possible; None if none fits.

    If checkpointing `is_fixed`, it is not changed.
    """
    if is_fixed:
        return config if fits(config) else None
    layers = range(config.model.num_layers + 1)
    fewest = bisect.bisect_left(layers, True, key=lambda n: fits(_with_checkpointing(config, n)))
    return _with_checkpointing(config, fewest) if fewest < len(layers) else None


def _candidates(config: Config) -> Iterator[Config]:
    """Yield every division of a step's sequences, and under FSDP also with gathered weights."""
    may_stay = config.topology.strategy == "fsdp" and _is_free(config, RESHARD)
    for divided in _batches(config):
        yield divided
        if may_stay:
            yield with_value(divided, RESHARD, False)


def _batches(config: Config) -> Iterator[Config]:
    """Yield every division of a step's sequences into micro-batches, the current one first."""
    yield config
    is_free = _is_free(config, BATCH) and _is_free(config, ACCUMULATION)
    if not is_free or reason_to_keep("batch", config):
        return
    size = batch(config)
    rows = size.per_device * size.accumulation
    for n in range(1, min(rows, MAX_ROWS) + 1):
        if rows % n == 0 and n != size.per_device and divides_evenly(config, n):
            yield with_value(with_value(config, BATCH, n), ACCUMULATION, rows // n)


def _with_checkpointing(config: Config, num_layers: int) -> Config:
    """Return a copy that recomputes `num_layers` layers, from none to all of them."""
    layers = num_layers if 0 < num_layers < config.model.num_layers else None
    return with_value(with_value(config, CHECKPOINTING, num_layers > 0), LAYERS, layers)


def _with_long_prompts(config: Config) -> Config:
    """Return a copy whose completions are longer by the tokens that long prompts may add.

    batch() assumes prompts of PROMPT_TOKENS, so the plan would not cover longer ones.
    """
    completion = value_or_none(config, "max_completion_length")
    has_limit = config.topology.server_max_length or value_or_none(config, "vllm_max_model_length")
    has_short_prompts = config.data.kind in ("reasoning", "code")
    if not completion or has_limit or has_short_prompts:
        return config
    tokens = int(completion) + MAX_PROMPT_TOKENS - PROMPT_TOKENS
    return with_value(config, "method.args.max_completion_length", tokens)


def _with_choices_of(config: Config, best: Config) -> Config:
    """Return `config` with the values of `best` as choices, each with reason and predicted gain."""
    for reasons in (
        {
            BATCH: "the fastest division of the same sequences that fits",
            ACCUMULATION: f"follows from {BATCH}",
        },
        {
            CHECKPOINTING: "the activations fit without it",
            LAYERS: "the fewest recomputed layers that fit",
        },
        {RESHARD: "gathered weights fit, so each step gathers them once"},
    ):
        changed = config
        for key in reasons:
            changed = with_value(changed, key, leaf(best, key))
        gain = _gain(estimate_speed(config).step_s, estimate_speed(changed).step_s)
        for key, reason in reasons.items():
            config = _with_choice(config, key, leaf(best, key), reason + gain)
    return config


def _gain(before_s: float | None, after_s: float | None) -> str:
    """Return the predicted gain as the end of a reason; '' if there is no gain."""
    gain = round(before_s / after_s, 2) if before_s and after_s else 1.0
    return f"; predicted {gain:.2f}x" if gain > 1 else ""


def _without_slow_compile(config: Config) -> Config:
    """Return `config`, but without compilation if that takes longer than it saves."""
    compiles = any(choice.key == COMPILE and choice.value for choice in config.chosen)
    if not compiles or config.precision.compute == "fp8":
        return config
    eager, steps = with_value(config, COMPILE, False), num_steps(config, batch(config))
    eager_s, compiled_s = (estimate_speed(_without_overlap(c)).step_s for c in (eager, config))
    saved_s = eager_s - compiled_s if eager_s and compiled_s else 0.0
    pays = saved_s > 0 and (steps is None or steps * saved_s > COMPILE_S)
    loss = "compiling gains nothing"
    if steps and saved_s > 0:
        loss = f"{steps} steps save {steps * saved_s:.0f} s, but compiling takes {COMPILE_S:.0f} s"
    chosen = list(config.chosen)
    for i, choice in enumerate(chosen):
        if choice.key == COMPILE:
            reason = choice.reason + _gain(eager_s, compiled_s) if pays else loss
            chosen[i] = dataclasses.replace(choice, value=pays, reason=reason)
    return dataclasses.replace(config if pays else eager, chosen=chosen)


def recorded_choices(composition: Mapping[str, Any]) -> list[Choice]:
    """Return the choices in a recorded composition."""
    return [Choice(**choice) for choice in composition.get("chosen", [])]
