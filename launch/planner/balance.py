"""Balance generation and training in a GRPO step under topology=split: find the number of servers with the most tokens per second.

Every candidate is a copy of the composition with speed=auto's choices for it; none is composed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch import topology
from launch.batch import apply_effective_batch, batch
from launch.check import check_given, refusals
from launch.errors import UserError
from launch.machine.detect import Host
from launch.planner import margin
from launch.planner.choose import ACCUMULATION, BATCH, choose, with_value, without_choices
from launch.planner.speed import speed
from launch.schema import Config

KEY, AUTO = "topology.servers", "auto"
GAIN = 1.02  # the least gain that changes the split: the planner errs by more
ELSEWHERE = Host("python3", num_cores=1)  # no host in particular: the number of servers must not depend on where it is planned


@dataclass(frozen=True)
class Balance:
    """Seconds of both halves, and the fastest split: its gain in tokens per second (1.2: a fifth more), and its sequences per step."""

    generation_s: float
    training_s: float
    bound: str  # generation or training, whichever takes longer
    servers: int
    gain: float
    sequences: int


def balance(config: Config, host: Host) -> Balance | None:
    """Return both halves of a step and the fastest split; None without a server or a predicted speed."""
    now = speed(config)
    if config.topology.name != "split" or now.generation_s is None or now.training_s is None or not now.tokens_per_second:
        return None
    best = _fastest(config, host)
    gain = (speed(best).tokens_per_second or 0.0) / now.tokens_per_second if best else 1.0
    if best is None or gain < GAIN:
        best, gain = config, 1.0
    bound = "generation" if now.generation_s > now.training_s else "training"
    return Balance(now.generation_s, now.training_s, bound, best.topology.servers, round(gain, 2), batch(best).sequences)


def with_servers(config: Config) -> Config:
    """Replace topology.servers=auto with the fastest number, or the smallest that the rules allow if no speed is predicted or none fits.
    Raises UserError."""
    given = config.topology.servers
    if isinstance(given, int) and not isinstance(given, bool):
        return config
    if given != AUTO:
        raise UserError(f"{KEY}={given}: it takes a whole number or {AUTO}.")
    if config.topology.name != "split":
        raise UserError(f"{KEY}={AUTO} under topology={config.topology.name}: it has no server. Use: topology=split, or no {KEY}.")
    one = with_value(config, KEY, 1)
    check_given(one)
    if config.method.kind != "trainer":
        return one
    # The choices for a trainer hardly depend on the number of trainers, so they are made once.
    possible = next((plain for plain in _splits(one) if not refusals(plain)), None)
    best = _fastest(choose(possible, ELSEWHERE), ELSEWHERE) if possible and speed(possible).step_s else None
    return with_value(config, KEY, (best or possible or one).topology.servers)


def _fastest(config: Config, host: Host) -> Config | None:
    """Return the fastest split that passes every rule and fits, with fewer servers on a tie, or None."""
    plain = {split.topology.servers: split for split in _splits(without_choices(config))}
    sized = [_divided(with_value(config, KEY, servers), split) for servers, split in plain.items()]
    for split in sorted(sized, key=lambda split: -(speed(split).tokens_per_second or 0.0)):
        if not refusals(plain[split.topology.servers]) and margin.has_room(split, host):
            return split
    return None


def _splits(config: Config) -> Iterator[Config]:
    """Yield a copy for each number of servers that leaves a trainer, with the effective batch divided among the trainers."""
    for servers in range(1, (topology.num_gpus(config) - 1) // config.topology.server_tensor_parallel + 1):
        split = with_value(with_value(config, KEY, servers), "method.args", {**config.method.args})
        try:
            apply_effective_batch(split)
        except UserError:  # the effective batch does not divide among them
            continue
        yield split


def _divided(config: Config, plain: Config) -> Config:
    """Divide a rank's sequences per step in `plain` into the micro-batches chosen for `config`, or smaller ones that divide them."""
    given, chosen = batch(plain), batch(config).per_device
    rows = given.per_device * given.accumulation
    if rows == chosen * batch(config).accumulation:
        return config
    per_device = max(n for n in range(1, min(rows, chosen) + 1) if rows % n == 0)
    return with_value(with_value(config, BATCH, per_device), ACCUMULATION, rows // per_device)
