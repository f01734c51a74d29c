"""Balance generation and training in a GRPO step under topology=split.

Find the number of servers with the most tokens per second.

Every candidate is a copy of the composition with speed=auto's choices for it. None is composed
again.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.config.choose import ACCUMULATION, BATCH, choose, with_value, without_choices
from launch.core.errors import UserError
from launch.estimate import margin
from launch.estimate.batch_counts import apply_effective_batch, batch
from launch.estimate.speed import speed
from launch.machine import placement
from launch.machine.detect import Host
from launch.rules.check import check_settings, refusals
from launch.schema import Config
from launch.schema.plan import Balance

KEY, AUTO = "topology.servers", "auto"
GAIN = 1.02  # least gain that changes the split; the planner's error is larger
# No particular host: the number of servers must not depend on the planning machine.
ELSEWHERE = Host("python3", num_cores=1)


def balance(config: Config, host: Host) -> Balance | None:
    """Return both halves of a step and the fastest split; None without a server or a speed."""
    now = speed(config)
    if config.topology.name != "split" or not now.tokens_per_second:
        return None
    if now.generation_s is None or now.training_s is None:
        return None
    best = _fastest(config, host)
    gain = (speed(best).tokens_per_second or 0.0) / now.tokens_per_second if best else 1.0
    if best is None or gain < GAIN:
        best, gain = config, 1.0
    bound = "generation" if now.generation_s > now.training_s else "training"
    servers, sequences = best.topology.servers, batch(best).sequences
    return Balance(now.generation_s, now.training_s, bound, servers, round(gain, 2), sequences)


def with_servers(config: Config) -> Config:
    """Return a copy with the fastest number in place of topology.servers=auto. Raises UserError.

    If no speed is predicted, or no number fits, it is the smallest that the rules allow.
    """
    servers = config.topology.servers
    if isinstance(servers, int) and not isinstance(servers, bool):
        return config
    if servers != AUTO or config.topology.name != "split":
        raise UserError(
            f"{KEY}={servers}: it takes a whole number, or {AUTO} under topology=split, which "
            f"has a server. Use: topology=split, or no {KEY}."
        )
    minimal = with_value(config, KEY, 1)
    check_settings(minimal)
    if not config.method.trains:
        return minimal
    # The choices for a trainer hardly depend on the number of trainers, so they are made once.
    possible = next((plain for plain in _splits(minimal) if not refusals(plain)), None)
    best = None
    if possible and speed(possible).step_s:
        best = _fastest(choose(possible, ELSEWHERE), ELSEWHERE)
    return with_value(config, KEY, (best or possible or minimal).topology.servers)


def _fastest(config: Config, host: Host) -> Config | None:
    """Return the fastest split that passes every rule and fits; on a tie, with fewer servers."""
    plain = {split.topology.servers: split for split in _splits(without_choices(config))}
    sized, most = [], batch(config).per_device
    for servers, split in plain.items():
        candidate, rows = with_value(config, KEY, servers), batch(split)
        # divide a rank's sequences per step into micro-batches of at most `config`'s
        num = rows.per_device * rows.accumulation
        if num != most * batch(candidate).accumulation:
            per_device = max(n for n in range(1, min(num, most) + 1) if num % n == 0)
            candidate = with_value(candidate, BATCH, per_device)
            candidate = with_value(candidate, ACCUMULATION, num // per_device)
        sized.append(candidate)
    for split in sorted(sized, key=lambda split: -(speed(split).tokens_per_second or 0.0)):
        if not refusals(plain[split.topology.servers]) and margin.has_room(split, host):
            return split
    return None


def _splits(config: Config) -> Iterator[Config]:
    """Yield a copy per number of servers, with the effective batch divided among the trainers."""
    most = (placement.num_gpus(config) - 1) // config.topology.server_tensor_parallel
    for servers in range(1, most + 1):
        split = with_value(with_value(config, KEY, servers), "method.args", {**config.method.args})
        try:
            apply_effective_batch(split)
        except UserError:  # the trainers do not divide the effective batch
            continue
        yield split
