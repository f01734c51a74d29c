"""Offer settings that are faster but change results; a plan lists each with its gain and its price."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from launch.check import refusals
from launch.machine.detect import Host
from launch.planner import margin
from launch.planner.choose import choose, with_value, without_choices
from launch.planner.speed import speed
from launch.schema import Adapter, Config
from launch.schema.enums import Speed, Vendor
from launch.trainer_args import argument, known

CONF = Path(__file__).parents[2] / "conf"
GAIN = 1.05  # the least gain worth a price
OPTIMIZER = "adamw_torch_8bit"  # torchao's


@dataclasses.dataclass(frozen=True)
class Offer:
    """Overrides to add to the command, their gain (1.2: a fifth more predicted tokens per second), and what they cost."""

    overrides: list[str]
    gain: float
    price: str


def faster(config: Config, host: Host) -> list[Offer]:
    """Return offers for a planned composition, largest gain first. Each passes every rule and fits, with the choices that it would get."""
    now = speed(config).tokens_per_second
    if config.speed == Speed.off or config.smoke or config.hardware.vendor == Vendor.none or not now:
        return []
    found = []
    for overrides, price, candidate in _candidates(config):
        if refusals(candidate):
            continue
        chosen = choose(candidate, host)
        rate = speed(chosen).tokens_per_second or 0.0
        if rate >= GAIN * now and margin.has_room(chosen, host):
            found.append(Offer(overrides, round(rate / now, 2), price))
    return sorted(found, key=lambda offer: -offer.gain)


def _candidates(config: Config) -> Iterator[tuple[list[str], str, Config]]:
    """Yield (overrides, price, the composition with them). An offer never contradicts what the user set. No choice depends on overlap, so
    its offers keep those that were made."""
    chosen, config = config, without_choices(config)
    precision, whole = config.precision, config.adapter.rank is None
    if precision.weights == "fp32" and precision.compute in ("bf16", "fp8"):
        lost = "16-bit weights and moments: an update below 1/256 of its weight is lost"
        price = lost if whole else "the frozen base is rounded to 16 bits"
        yield ["precision.weights=bf16"], price, dataclasses.replace(config, precision=dataclasses.replace(precision, weights="bf16"))
    if whole and "optim" in known(config) and "method.args.optim" not in config.speed_keeps and argument(config, "optim") != OPTIMIZER:
        price = "AdamW's moments are rounded to 8 bits (torchao)"
        yield [f"method.args.optim={OPTIMIZER}"], price, with_value(config, "method.args.optim", OPTIMIZER)
    if precision.name == "bf16":
        eighth = dataclasses.replace(precision, name="fp8", compute="fp8")
        price = "linear layers multiply in 8 bits (torchao)"
        yield ["precision=fp8"], price, dataclasses.replace(config, precision=eighth)
    if config.topology.name == "split" and config.topology.overlap is False:
        price = "completions lag by one generation, corrected by importance sampling"
        yield ["topology.overlap=true"], price, with_value(chosen, "topology.overlap", True)
        price = "completions lag by up to two generations, corrected likewise; gains more than this if their lengths differ"
        yield ["topology.overlap=stream"], price, with_value(chosen, "topology.overlap", "stream")
    if whole:
        price = "trains about 1% of the parameters, and needs ten times the learning rate"
        yield ["adapter=lora"], price, dataclasses.replace(config, adapter=Adapter(**_option("adapter/lora")))


@functools.cache
def _option(name: str) -> dict[str, Any]:
    """Return the values of a conf/ file that includes no other."""
    content: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return content
