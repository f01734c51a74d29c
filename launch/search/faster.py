"""Offer faster settings that change results, and GRPO on fewer GPUs, which is cheaper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from launch.config.auto import fits_on_one_gpu
from launch.config.choose import choose, with_value, without_choices
from launch.config.compose import compose
from launch.config.request import Request
from launch.core.errors import UserError
from launch.core.json_files import yaml_file
from launch.estimate import margin
from launch.estimate.batch_counts import ACCUMULATION, batch
from launch.estimate.run_length import MAX_STEPS, same_answers
from launch.estimate.speed import estimate_speed
from launch.machine.detect import Host
from launch.machine.placement import num_gpus, num_trainers
from launch.plan.balance import KEY as SERVERS
from launch.plan.balance import fastest_split, keeps_batch, with_sequences
from launch.plan.planning import prepare
from launch.rules.check import refusals
from launch.schema import Adapter, Config, Topology
from launch.schema.data import LrScaling
from launch.schema.enums import SpeedMode, Vendor
from launch.schema.plan import Balance, Offer
from launch.schema.trainer_args import known, value_or_none
from launch.search.remedies import FP16_PRICE

CONF = Path(__file__).parents[2] / "conf"
ROUNDING = "vLLM generates in the trainers, and its probabilities differ by rounding"
NUM_GPUS, SLEEP = "topology.num_gpus", "method.args.vllm_enable_sleep_mode=true"
STREAM = "topology.overlap=stream"
MIN_GAIN = 1.05  # speed-up of an offer
MIN_SAVING = 1.25  # factor of cost; less is within the planner's error, and takes longer
LARGER_STEP = 8  # times the sequences of a step
OPTIMIZER = "adamw_torch_8bit"  # of torchao
Candidate = tuple[list[str], str, Config]  # overrides, price, composition with the overrides


def faster(config: Config, host: Host, balance: Balance | None) -> list[Offer]:
    """Return the offers for a planned composition and its balance.

    The fastest split with nearly the same steps is first; the others follow by gain. Each passes
    every rule and fits in memory with the settings that speed=auto chooses for it.
    """
    if config.smoke or config.hardware.vendor == Vendor.none:
        return []
    splits = _offers(config, host, _split(config, balance))
    others = _offers(config, host, _candidates(config, host))
    return [*splits, *sorted(others, key=lambda offer: -offer.gain)]


def _offers(config: Config, host: Host, candidates: Iterable[Candidate]) -> list[Offer]:
    """Return an offer for each candidate that is faster, with as many answers in all."""
    current = estimate_speed(config).tokens_per_second
    if not current:
        return []
    offers = []
    for candidate in candidates:
        for overrides, price, changed in (candidate, *_smaller(*candidate)):
            if steps := same_answers(config, batch(changed).sequences):
                overrides = [*overrides, f"{MAX_STEPS}={steps}"]
                changed = with_value(changed, MAX_STEPS, steps)
            if refusals(changed):
                continue
            chosen = choose(changed, host)
            speed = estimate_speed(chosen)
            rate = speed.tokens_per_second or 0.0
            if rate >= MIN_GAIN * current and margin.fits_with_margin(chosen, host):
                offers.append(Offer(overrides, round(rate / current, 2), price, speed.unit_cost))
                break
    return offers


def cheaper(config: Config, command: Request, host: Host) -> list[Offer]:
    """Return GRPO with as many sequences per step on fewer GPUs: the fastest and the cheapest.

    Trainers mostly wait for completions, so a step on fewer GPUs takes little longer. Candidates
    are composed like the user's command, because fewer GPUs change what is left at auto. Return []
    if the planned run is the cheapest, or without price_per_gpu_hour if its trainers do not wait
    for most of a step.
    """
    current, sequences = estimate_speed(config), batch(config).sequences
    is_fixed = config.smoke or config.runtime.slurm.nodes > 1 or ACCUMULATION in config.speed_keeps
    if not current.step_s or is_fixed or not config.method.generates:
        return []
    waits = config.topology.servers and 2 * (current.training_s or 0.0) < current.step_s
    if config.price_per_gpu_hour is None and not waits:
        return []
    size, current_gpu_s = f"effective_batch={sequences}", current.step_s * num_gpus(config)
    offers: list[tuple[float, Offer]] = []  # with the share of the GPU-hours
    one = ["topology=colocate", f"{NUM_GPUS}=1", size]
    several = [[f"{NUM_GPUS}={gpus}", size] for gpus in range(2, num_gpus(config))]
    for overrides in (one, [*one, SLEEP], *several) if num_gpus(config) > 1 else ():
        if offers and SLEEP in overrides:  # vLLM need not sleep
            continue
        with suppress(UserError):
            chosen = choose(prepare(compose(command.plus(*overrides)))[0], host)
            speed = estimate_speed(chosen)
            share = (speed.step_s or math.inf) * num_gpus(chosen) / current_gpu_s
            if share * MIN_SAVING <= 1 and margin.fits_with_margin(chosen, host):
                gain = (speed.tokens_per_second or 0.0) / (current.tokens_per_second or 1.0)
                price = f"the same {sequences} sequences per step"
                if speed.unit_cost is None:
                    price += f" in {share:.0%} of the GPU-hours"
                price += f"; {ROUNDING}" * (overrides not in several)
                offer = Offer(overrides, round(gain, 2), price, speed.unit_cost)
                offers.append((share, offer))
    by_share = [offer for _, offer in sorted(offers, key=lambda pair: pair[0])]
    fastest = max((offer.gain for offer in by_share), default=0.0)
    as_fast = [offer for offer in by_share if offer.gain * MIN_GAIN >= fastest]
    return [*as_fast[:1], *by_share[: by_share[:1] != as_fast[:1]]]


def _smaller(overrides: list[str], price: str, candidate: Config) -> Iterator[Candidate]:
    """Yield an offer of GRPO with less memory, if vLLM or accumulation leaves too little."""
    if overrides == [STREAM]:  # takes no more memory
        return
    sleep = SLEEP.partition("=")[0]
    if candidate.topology.name == "colocate" and sleep not in candidate.speed_keeps:
        yield [*overrides, SLEEP], price, with_value(candidate, sleep, True)
    if candidate.method.generates and candidate.topology.strategy == "ddp":
        key = "topology.strategy"
        rest = [override for override in overrides if not override.startswith(key)]
        sharded = with_value(candidate, key, "fsdp")
        yield [*rest, f"{key}=fsdp"], f"{price}; ranks exchange weights", sharded


def _candidates(config: Config, host: Host) -> Iterator[Candidate]:
    """Yield the candidates but _split.

    No override contradicts the user's. The compositions do not have the choices of speed=auto.
    """
    chosen, config = config, without_choices(config)
    if config.speed == SpeedMode.off:  # other offers depend on the choices of speed=auto
        price = "the same learning curve, but not the settings that you fixed"
        yield ["speed=auto"], price, dataclasses.replace(config, speed=SpeedMode.auto)
        return
    precision, trains_all = config.precision, config.adapter.rank is None
    if precision.weights == "fp32" and precision.compute in ("bf16", "fp8"):
        price = "the frozen base is rounded to 16 bits"
        if trains_all:
            price = "16-bit weights and moments, so updates below 1/256 of their weight are lost"
        bf16 = dataclasses.replace(precision, weights="bf16")
        yield ["precision.weights=bf16"], price, dataclasses.replace(config, precision=bf16)
    optim = "method.args.optim"
    is_free = "optim" in known(config) and optim not in config.speed_keeps
    if trains_all and is_free and value_or_none(config, "optim") != OPTIMIZER:
        price = "AdamW's moments are rounded to 8 bits (torchao)"
        yield [f"{optim}={OPTIMIZER}"], price, with_value(config, optim, OPTIMIZER)
    if precision.name == "bf16" and chosen.step.compile:  # fp8 needs compiled layers
        fp8 = dataclasses.replace(precision, name="fp8", compute="fp8")
        price = "linear layers multiply in 8 bits (torchao)"
        yield ["precision=fp8"], price, dataclasses.replace(config, precision=fp8)
    has = config.hardware.precisions
    if precision.name == "fp32" and "fp16" in has and "bf16" not in has:
        fp16 = dataclasses.replace(precision, name="fp16", compute="fp16")
        yield ["precision=fp16"], FP16_PRICE, dataclasses.replace(config, precision=fp16)
    nodes = config.runtime.slurm.nodes
    if config.method.generates and config.topology.name != "colocate":
        candidate = _colocated(config, num_gpus(config))
        if config.effective_batch in (None, batch(candidate[-1]).sequences):
            yield candidate
    if config.method.generates and num_gpus(config) == nodes == 1:
        yield from _colocated_with_larger_step(config)
    if config.topology.servers and "effective_batch" not in config.speed_keeps and nodes == 1:
        free = dataclasses.replace(chosen, effective_batch=None)  # topology.servers=auto chose it
        yield from _split_with_larger_step(free, host)
        yield from _with_wider_servers(free, host)
    overlap = STREAM.partition("=")[0]
    if config.topology.overlap is True and overlap not in config.speed_keeps:
        price = "answers are up to two generations old, with the same learning curve"
        yield [STREAM], price, with_value(config, overlap, "stream")
    if trains_all:
        price = "trains about 1% of the parameters, and needs ten times the learning rate"
        lora = Adapter(**yaml_file(CONF / "adapter/lora.yaml"))
        yield ["adapter=lora"], price, dataclasses.replace(config, adapter=lora)


def _split(config: Config, balance: Balance | None) -> Iterator[Candidate]:
    """Yield the fastest split of the GPUs between servers and trainers, if it is another one."""
    if balance and balance.servers != config.topology.servers:
        split = with_value(without_choices(config), SERVERS, balance.servers)
        yield _of_split(config, with_sequences(split, balance.sequences))


def _of_split(config: Config, split: Config, price: str = "") -> Candidate:
    """Return a split as a candidate."""
    before, sequences = batch(config).sequences, batch(split).sequences
    overrides = [
        f"topology.{name}={value}"
        for name in ("servers", "server_tensor_parallel")
        if (value := getattr(split.topology, name)) != getattr(config.topology, name)
    ]
    if not keeps_batch(config):
        overrides.append(f"effective_batch={sequences}")
    if 1 in (num_trainers(config), num_trainers(split)) and not fits_on_one_gpu(config):
        overrides.append(f"topology.strategy={split.topology.strategy}")  # would change at auto
    same = f"{sequences} sequences per step, not {before}"
    same = f"the same {before} sequences per step" if sequences == before else same
    return overrides, price or same, without_choices(split)


def _split_with_larger_step(config: Config, host: Host) -> Iterator[Candidate]:
    """Yield the fastest split with a larger step, if trainers wait for completions.

    A server generates many completions in nearly the time of a few.
    """
    speed, before = estimate_speed(config), batch(config).sequences
    if keeps_batch(config) or (speed.generation_s or 0.0) <= (speed.training_s or 0.0):
        return
    if larger := fastest_split(config, host, LARGER_STEP * before):
        price = _price_of_larger_step(config, batch(larger).sequences, before)
        yield _of_split(config, larger, price)


def _colocated_with_larger_step(config: Config) -> Iterator[Candidate]:
    """Yield vLLM on the only GPU with a larger step, as _split_with_larger_step does on several."""
    if keeps_batch(config):
        return
    is_colocated, before = config.topology.name == "colocate", batch(config)
    overrides, rounding, candidate = ([], "", config) if is_colocated else _colocated(config, 1)
    sequences = LARGER_STEP * before.sequences
    price = _price_of_larger_step(config, sequences, before.sequences)
    price += f"; {rounding}" if rounding else ""
    larger = with_value(candidate, ACCUMULATION, LARGER_STEP * before.accumulation)
    yield [*overrides, f"effective_batch={sequences}"], price, larger


def _price_of_larger_step(config: Config, sequences: int, before: int) -> str:
    rate = " at the same learning rate" * (config.method.lr_scaling == LrScaling.none)
    return f"{sequences} sequences per step, not {before}, so fewer updates{rate}"


def _with_wider_servers(config: Config, host: Host) -> Iterator[Candidate]:
    """Yield servers of more GPUs each, which decode a large model faster."""
    width = config.topology.server_tensor_parallel
    wider: list[Config] = []
    for parallel in (2 * width, 4 * width):
        candidate = with_value(config, "topology.server_tensor_parallel", parallel)
        if parallel < num_gpus(config):
            wider += filter(None, [fastest_split(candidate, host, batch(config).sequences)])
    if wider:
        fastest = max(wider, key=lambda split: estimate_speed(split).tokens_per_second or 0.0)
        overrides, price, split = _of_split(config, fastest)
        price += "; time for exchanges between a server's GPUs is not counted"
        yield overrides, price, split


def _colocated(config: Config, gpus: int) -> Candidate:
    """Return vLLM in each training process, on this number of GPUs."""
    strategy = "none"
    if gpus > 1:
        strategy = "ddp" if config.topology.strategy == "none" else config.topology.strategy
    values = yaml_file(CONF / "topology/colocate.yaml")
    values |= {"num_gpus": gpus, "strategy": strategy}
    overrides = [f"topology={values['name']}", f"{NUM_GPUS}={gpus}"]
    overrides += [f"topology.strategy={strategy}"] * (gpus > 1)
    candidate = dataclasses.replace(config, topology=Topology(**values))
    if config.effective_batch:
        candidate = with_sequences(candidate, config.effective_batch)
    price = ROUNDING
    if (sequences := batch(candidate).sequences) != batch(config).sequences:
        price += f"; {sequences} sequences per step"
    return overrides, price, candidate
