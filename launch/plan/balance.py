"""Find the number of servers with the most tokens per second under topology=split.

Each candidate is a copy of the composition with another number of servers; composing each one again
would be slow.
"""

from collections.abc import Iterator

from launch.config.choose import choose, with_value, without_choices
from launch.core.errors import UserError
from launch.estimate import margin
from launch.estimate.batch_counts import apply_effective_batch, batch
from launch.estimate.speed import estimate_speed
from launch.machine import placement
from launch.machine.detect import Host
from launch.rules.check import check_settings, refusals
from launch.schema import Config
from launch.schema.plan import Balance

KEY, AUTO = "topology.servers", "auto"
MIN_GAIN = 1.02  # a smaller gain is within the planner's error
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
    best = _fastest(config, host)
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
    """Return a copy with the fastest number of servers in place of topology.servers=auto.

    If no speed is predicted or no number fits, use the smallest number that the rules allow. Raises
    UserError if topology.servers is neither a number nor auto.
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
    smallest = next((split for split in _splits(minimal) if not refusals(split)), None)
    best = None
    if smallest and estimate_speed(smallest).step_s:
        best = _fastest(choose(smallest, NEUTRAL_HOST), NEUTRAL_HOST)
    return with_value(config, KEY, (best or smallest or minimal).topology.servers)


def _fastest(config: Config, host: Host) -> Config | None:
    """Return the fastest split that passes every rule and fits in memory, or None.

    speed=auto makes its choices for each split. If several tie, return the split with the fewest
    servers. If `config` has no margin in memory, the others need none: every split with several
    trainers may then be as tight, and a single trainer would be much slower.
    """
    has_margin = margin.fits_with_margin(config, host)
    candidates = [
        choose(split, host) for split in _splits(without_choices(config)) if not refusals(split)
    ]
    candidates.sort(key=lambda split: -(estimate_speed(split).tokens_per_second or 0.0))
    fits = margin.fits_with_margin if has_margin else margin.fits
    return next((split for split in candidates if fits(split, host)), None)


def _splits(config: Config) -> Iterator[Config]:
    """Yield a copy for each number of servers whose trainers can share the effective batch."""
    max_servers = (placement.num_gpus(config) - 1) // config.topology.server_tensor_parallel
    for servers in range(1, max_servers + 1):
        split = with_value(with_value(config, KEY, servers), "method.args", {**config.method.args})
        try:
            apply_effective_batch(split)
        except UserError:  # the effective batch is not divisible by the number of trainers
            continue
        yield split
