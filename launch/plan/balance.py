"""Find the fastest split of the GPUs between servers and trainers under topology=split.

Each candidate is a copy of the composition with another number of servers; composing each one again
would be slow.
"""

import dataclasses
from collections.abc import Iterator

from launch.config.choose import choose, with_value, without_choices
from launch.core.errors import UserError
from launch.estimate import margin
from launch.estimate.batch_counts import ACCUMULATION, batch, nearest_batch
from launch.estimate.speed import estimate_speed
from launch.machine import placement
from launch.machine.detect import Host
from launch.rules.check import check_settings, refusals
from launch.schema import Config
from launch.schema.plan import Balance

KEY, AUTO = "topology.servers", "auto"
MIN_GAIN = 1.02  # a smaller gain is within the planner's error
NEARLY = 1.5  # factor between nearly equal numbers of sequences per step
# A neutral host, because the number of servers must not depend on the planning machine.
NEUTRAL_HOST = Host("python3", num_cores=1)


def balance(config: Config, host: Host) -> Balance | None:
    """Return a step's generation and training time in seconds, and the fastest split.

    Return None unless topology=split and its speed is predicted.
    """
    step = estimate_speed(config)
    if config.topology.name != "split" or not step.tokens_per_second:
        return None
    if step.generation_s is None or step.training_s is None:
        return None
    best = fastest_split(config, host)
    gain = (estimate_speed(best).tokens_per_second or 0.0) / step.tokens_per_second if best else 1.0
    if best is None or gain < MIN_GAIN:
        best, gain = config, 1.0
    bottleneck = "generation" if step.generation_s > step.training_s else "training"
    return Balance(
        step.generation_s,
        step.training_s,
        bottleneck,
        best.topology.servers,
        round(gain, 2),
        batch(best).sequences,
    )


def with_servers(config: Config) -> Config:
    """Return a copy with the fastest split in place of topology.servers=auto.

    A step gets nearly as many sequences as with the fewest servers that the rules allow. If no
    speed is predicted or nothing fits, use that number. Raises UserError if topology.servers is
    neither a number nor auto.
    """
    servers = config.topology.servers
    if isinstance(servers, int) and not isinstance(servers, bool):
        return config
    if servers != AUTO or config.topology.name != "split":
        raise UserError(
            f"{KEY}={servers}: expected a whole number, or {AUTO} under topology=split. Use: "
            f"topology=split {KEY}=auto, or no {KEY}."
        )
    minimal = with_value(config, KEY, 1)
    check_settings(minimal)
    if not config.method.trains:
        return minimal
    splits = _splits(minimal, config.effective_batch or batch(minimal).sequences)
    chosen = next((split for split in splits if not refusals(split)), None)
    if chosen is None:
        return minimal
    if estimate_speed(chosen).step_s:
        best = fastest_split(choose(chosen, NEUTRAL_HOST), NEUTRAL_HOST)
        chosen = best or chosen
    split = with_value(minimal, KEY, chosen.topology.servers)
    if keeps_batch(config):
        return split
    return dataclasses.replace(split, effective_batch=batch(chosen).sequences)


def fastest_split(config: Config, host: Host, sequences: int | None = None) -> Config | None:
    """Return the fastest split with nearly as many sequences per step, or nearly `sequences`.

    Each split first gets the nearest number that its trainers can share. The number of the fastest
    then decides, so no split with that number is faster than the one returned. None if none fits.
    """
    target = sequences or batch(config).sequences
    nearest = _fastest(config, host, target)
    return _fastest(config, host, batch(nearest).sequences, is_exact=True) if nearest else None


def keeps_batch(config: Config) -> bool:
    """Return whether the user, or topology.servers=auto, fixed the batch of a step or of a rank."""
    return config.effective_batch is not None or ACCUMULATION in config.speed_keeps


def _fastest(config: Config, host: Host, sequences: int, is_exact: bool = False) -> Config | None:
    """Return the fastest split that passes every rule and fits in memory, or None.

    speed=auto makes its choices for each split. If several tie, return the split with the fewest
    servers. If `config` has no margin in memory, the others need none: every split with several
    trainers may then be as tight, and a single trainer would be much slower.
    """
    has_margin = margin.fits_with_margin(config, host)
    splits = _splits(without_choices(config), sequences, is_exact)
    candidates = [choose(split, host) for split in splits if not refusals(split)]
    candidates.sort(key=lambda split: -(estimate_speed(split).tokens_per_second or 0.0))
    fits = margin.fits_with_margin if has_margin else margin.fits
    return next((split for split in candidates if fits(split, host)), None)


def _splits(config: Config, sequences: int, is_exact: bool = False) -> Iterator[Config]:
    """Yield a copy for each number of servers, with nearly as many sequences per step.

    Trainers that cannot share the effective batch, or nearly or exactly `sequences`, are left out.
    """
    max_servers = (placement.num_gpus(config) - 1) // config.topology.server_tensor_parallel
    for servers in range(1, max_servers + 1):
        split = with_sequences(with_value(config, KEY, servers), sequences)
        needed, shared = config.effective_batch or sequences, batch(split).sequences
        nearly = 1.0 if config.effective_batch or is_exact else NEARLY
        if needed / nearly <= shared <= needed * nearly:
            yield split


def with_sequences(config: Config, sequences: int) -> Config:
    """Return a copy with nearly this number per step, or `config` if the accumulation is fixed."""
    if config.effective_batch is None and keeps_batch(config):
        return config
    size = batch(config)
    rounds = nearest_batch(config, sequences) // (size.ranks * size.per_device)
    return with_value(config, ACCUMULATION, rounds)
