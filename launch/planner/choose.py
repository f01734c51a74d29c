"""speed=auto: what a training takes in place of defaults, so that a step is fast and its result the same.

A key that somebody gave (config.speed_keeps) is never changed, nor what a hardware file says. Among the settings that fit the memory that
is predicted, with the planner's own error left free, those with the most predicted tokens a second are taken. Everything here is a pure
function of a composition that is checked already (launch/plan.py, prepare); a candidate is a copy of it, and none is composed anew.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch import topology
from launch.batch import PROMPT, batch
from launch.machine.detect import Host
from launch.planner import margin, memory, unchanging
from launch.planner.speed import COMPILE_S, num_steps, speed
from launch.schema import Choice, Config
from launch.schema.enums import Rows, Speed, Vendor
from launch.trainer_args import argument

BATCH, ACCUMULATION = "method.args.per_device_train_batch_size", "method.args.gradient_accumulation_steps"
CHECKPOINTING, LAYERS = "method.args.gradient_checkpointing", "step.checkpointed_layers"
COMPILE, ROWS, WORKERS = "step.compile", "step.rows", "hardware.dataloader.num_workers"
OF_A_BATCH = (BATCH, ACCUMULATION)
STEPS = ("trainer", "tune")  # kinds whose ranks read step.*
GAIN = 1.02  # a setting is changed for this much: smaller differences are within the formula's own error
MOST_ROWS = 64  # of a micro-batch that is tried: more fill no GPU better
FEWEST_WORKERS, MOST_WORKERS = 1, 4  # of a rank's loader; 4 is conf/hardware/base/common.yaml's
PLAIN = "speed=off: the plain way"
# That GRPO's memory has to hold beside a completion, where nothing bounds a prompt: four times what batch() counts for one.
PROMPT_TOKENS = 1024


def choose(config: Config, host: Host) -> Config:
    """`config` with every choice made, and listed in its `chosen`. A key that is listed there already stays as it is."""
    if config.method.kind not in STEPS:
        return config
    off = config.speed == Speed.off or config.method.kind == "tune"
    config = _settled(config, COMPILE, *_compile(config, off))
    config = _settled(config, ROWS, *((Rows.padded, PLAIN) if off else _rows(config)))
    if off or config.smoke:
        return config
    for key, (value, reason) in _workers(config, host):
        config = _settled(config, key, value, reason)
    if config.hardware.vendor == Vendor.none or speed(config).step_s is None:
        return config
    return _sized(_worth_compiling(config), host)


def apply(config: Config, choices: list[Choice]) -> Config:
    """`config` with choices of before, as a record has them; what somebody gives now stays as it is given."""
    for choice in choices:
        value = Rows[choice.value] if choice.key == ROWS and isinstance(choice.value, str) else choice.value
        config = _settled(config, choice.key, value, choice.reason)
    return config


def undone(config: Config) -> Config:
    """The composition as it was before anything was chosen."""
    for choice in reversed(config.chosen):
        config = with_value(config, choice.key, choice.before)
    return dataclasses.replace(config, chosen=[])


def with_value(config: Config, key: str, value: Any) -> Config:
    """A copy with another value at a dotted key; None takes an argument of the method away."""
    group, *rest = key.split(".")
    return dataclasses.replace(config, **{group: _with(getattr(config, group), rest, value)})


def _with(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(node, dict):
        others = {key: item for key, item in node.items() if key != name}
        return {**node, name: value} if value is not None else others
    return dataclasses.replace(node, **{name: _with(getattr(node, name), rest, value) if rest else value})


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _is_free(config: Config, key: str) -> bool:
    """Whether nobody gave it, and no choice of before did."""
    given = {*config.speed_keeps, *(choice.key for choice in config.chosen)}
    return key not in given and not (key.startswith("step.") and _value(config, key) is not None)


def _settled(config: Config, key: str, value: Any, reason: str) -> Config:
    """With a choice made and listed, where the key is free and has another value."""
    before = _value(config, key)
    if not _is_free(config, key) or before == value:
        return config
    choice = Choice(key, value.name if isinstance(value, Rows) else value, reason, before)
    return dataclasses.replace(with_value(config, key, value), chosen=[*config.chosen, choice])


def _compile(config: Config, off: bool) -> tuple[bool, str]:
    """Whether each layer is compiled, and why. What forbids it is looked at first."""
    eager = unchanging.why_eager(config)
    if eager:
        return False, eager
    if config.precision.compute == "fp8":
        return True, "precision=fp8 is a third as fast as bf16 without it"
    if off:
        return False, PLAIN
    checked = "" if config.hardware.compile_measured else f"; on {config.hardware.name} the first micro-batch is computed both ways"
    return True, f"fewer and larger kernels{checked}"


def _rows(config: Config) -> tuple[Rows, str]:
    padded = unchanging.why_padded(config)
    if padded:
        return Rows.padded, padded
    generates = config.method.name == "grpo"
    grouped = "each micro-batch is padded to its own longest" if generates else "rows of like length share a micro-batch"
    if config.method.name == "dpo":
        return Rows.grouped, f"{grouped}, inside one optimizer step"
    apart = _why_apart(config)
    if apart:
        return Rows.grouped, f"{apart}; {grouped}"
    what = "completions of a micro-batch" if generates else "rows of a step"
    return Rows.packed, f"{what} laid end to end hold no padding; {config.hardware.packed_attention} respects their boundaries"


def _why_apart(config: Config) -> str | None:
    """Return why rows of SFT, or completions of GRPO, cannot be packed; None if they can."""
    kernel = config.hardware.packed_attention
    if kernel is None:
        return f"{config.hardware.name} has no measured attention with boundaries"
    if config.precision.compute == "fp32" and kernel != "sdpa":
        return f"{kernel} computes in 16 bits only"
    if config.hardware.vendor == Vendor.none and not config.smoke:
        return "a CPU's attention would compute the scores of all pairs of tokens"
    if argument(config, "torch_compile"):
        return "method.args.torch_compile=true makes one graph of the model, which the packed kernel is not part of"
    if config.method.name == "grpo":
        return _why_completions_apart(config)
    return f"{kernel} needs a bound of the length, and method.args.max_length is null" if argument(config, "max_length") is None else None


def _why_completions_apart(config: Config) -> str | None:
    if config.topology.strategy == "zero3":
        return "ZeRO-3's head is not whole"
    unfit = [name for name in ("cast_lm_head_to_fp32", "use_transformers_continuous_batching") if argument(config, name)]
    return f"method.args.{unfit[0]}=true needs TRL's own passes" if unfit else None


def _workers(config: Config, host: Host) -> Iterator[tuple[str, tuple[int, str]]]:
    """Fewer loader workers where this host, if it is the one that trains, has few cores."""
    given, ranks = config.hardware.dataloader.num_workers, topology.trainers_of_a_node(config)
    if config.data.streaming or not given or not host.gpus_of(config.hardware.vendor):
        return  # streamed rows are shared out by the number of workers, so another number is another order
    spare = max(FEWEST_WORKERS, min(MOST_WORKERS, host.num_cores // ranks - 1))
    if spare < given:
        yield WORKERS, (spare, f"{host.num_cores} cores for {ranks} rank(s)")


def _sized(config: Config, host: Host) -> Config:
    """Micro-batch and checkpointing: of those that fit, the ones with the most tokens a second."""
    processes = topology.processes(config, host, Path(config.run_root))
    smaller = memory.measured(config, processes, host)

    def fits(candidate: Config) -> bool:
        found = memory.memory(_longest_prompts(candidate), processes, smaller)
        return all(entry.fits and not margin.close(entry) for entry in found)

    plain = speed(config).tokens_per_second or 0.0
    best, most, fitted = config, plain * GAIN, fits(config)
    for candidate in _candidates(config, fits):
        rate = speed(candidate).tokens_per_second or 0.0
        if rate > most or not fitted:  # what does not fit is slower than anything that does
            best, most, fitted = candidate, rate * GAIN, True
    return _listed(config, best, plain)


def _candidates(config: Config, fits: Any) -> Iterator[Config]:
    """For each micro-batch the fewest layers that recompute and still fit."""
    for sized in _batches(config):
        if not _is_free(config, CHECKPOINTING) or not _is_free(config, LAYERS) or unchanging.why_checkpointing_stays(config):
            yield from [sized] if fits(sized) else []
            continue
        layers = range(config.model.num_layers + 1)
        fewest = bisect.bisect_left(layers, True, key=lambda n, sized=sized: fits(_recomputing(sized, n)))  # type: ignore[misc]
        if fewest < len(layers):
            yield _recomputing(sized, fewest)


def _batches(config: Config) -> Iterator[Config]:
    """The same sequences of an optimizer step, divided otherwise; its own division first."""
    yield config
    if unchanging.why_batch_stays(config) or not (_is_free(config, BATCH) and _is_free(config, ACCUMULATION)):
        return
    size = batch(config)
    rows = size.per_device * size.accumulation
    for n in range(1, min(rows, MOST_ROWS) + 1):
        if rows % n == 0 and n != size.per_device and unchanging.divides_evenly(config, n):
            yield with_value(with_value(config, BATCH, n), ACCUMULATION, rows // n)


def _recomputing(config: Config, layers: int) -> Config:
    """With so many layers checkpointed, none of them to all."""
    some = layers if 0 < layers < config.model.num_layers else None
    return with_value(with_value(config, CHECKPOINTING, layers > 0), LAYERS, some)


def _longest_prompts(config: Config) -> Config:
    """GRPO's completions made longer by what a prompt may be longer than it is planned, so that the batch's memory is of these."""
    longest = argument(config, "max_completion_length")
    bounded = config.topology.server_max_length or argument(config, "vllm_max_model_length")
    if not longest or bounded or config.data.kind in ("reasoning", "code"):  # whose prompts are short
        return config
    return with_value(config, "method.args.max_completion_length", int(longest) + PROMPT_TOKENS - PROMPT)


def _listed(config: Config, best: Config, plain: float) -> Config:
    """`best` with each value that differs listed, and the reason: what it gains."""
    gain = (speed(best).tokens_per_second or 0.0) / plain if plain else 1.0
    reasons = {
        BATCH: "the same sequences a step, divided as is fastest and fits",
        ACCUMULATION: f"follows from {BATCH}",
        CHECKPOINTING: "the activations fit without",
        LAYERS: "as few layers recompute as fit",
    }
    for key, reason in reasons.items():
        config = _settled(config, key, _value(best, key), f"{reason}; predicted {gain:.2f}x" if gain > 1 else f"{reason}")
    return config


def _worth_compiling(config: Config) -> Config:
    """Eager again where the run is over before compiling has paid."""
    choice = next((choice for choice in config.chosen if choice.key == COMPILE and choice.value), None)
    if choice is None or config.precision.compute == "fp8":
        return config
    eager = with_value(config, COMPILE, False)
    steps, slow, fast = num_steps(config, batch(config)), speed(eager).step_s, speed(config).step_s
    saved = slow - fast if slow and fast else 0.0
    if saved > 0 and (steps is None or steps * saved > COMPILE_S):
        return config
    why = f"{steps} steps save {steps * saved:.0f} s, and compiling takes {COMPILE_S:.0f}" if steps else "it would be no faster"
    kept = [dataclasses.replace(one, value=False, reason=why) if one is choice else one for one in config.chosen]
    return dataclasses.replace(eager, chosen=kept)


def recorded(content: Mapping[str, Any]) -> list[Choice]:
    """Choices of a recorded composition."""
    return [Choice(**one) for one in content.get("chosen", [])]
