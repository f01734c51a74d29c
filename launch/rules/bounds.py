"""Reject numbers whose range follows from other settings. The schema has the fixed ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.config.compose import leaf
from launch.estimate.batch import least_staleness
from launch.estimate.memory import longest_served_gb
from launch.rules.rule import Rule
from launch.rules.topology import has_vllm, is_split, longest
from launch.schema import Config
from launch.schema.checked import Range
from launch.schema.enums import Vendor
from launch.schema.trainer_args import known


@dataclass(frozen=True)
class Bound:
    name: str
    key: str
    allowed: Callable[[Config], Range]
    why: str
    remedy: str = ""  # besides a number in the range
    when: Callable[[Config], bool] = lambda config: True

    def rule(self) -> Rule:
        def applies(config: Config) -> bool:
            value = leaf(config, self.key)
            return (
                isinstance(value, (int, float))
                and self.when(config)
                and value not in self.allowed(config)
            )

        return Rule(
            self.name,
            applies,
            lambda config: f"{self.key}={leaf(config, self.key)}: {self.why}",
            lambda config: f"{self.allowed(config)}" + (self.remedy and f"; or {self.remedy}"),
        )


BOUNDS = [
    Bound(
        "num_gpus",
        "topology.num_gpus",
        lambda c: Range(least=1, most=c.hardware.gpus_per_node),
        "a node has fewer GPUs",
        "hardware.gpus_per_node= for a larger node",
        lambda c: c.hardware.vendor != Vendor.none,
    ),
    Bound(
        "split_needs_a_server",
        "topology.servers",
        lambda c: Range(least=1),
        "topology=split generates with a server",
        when=is_split,
    ),
    Bound(
        "server_cache",
        "topology.server_cache_gb",
        lambda c: Range(least=longest_served_gb(c)),
        "one sequence takes more",
        "a smaller topology.server_max_length",
        lambda c: is_split(c) or has_vllm(c),
    ),
    Bound(
        "server_length",
        "topology.server_max_length",
        lambda c: Range(least=longest(c) + 1, most=c.model.max_positions),
        "no room for a prompt and its completion, or more than the model's positions",
        when=is_split,
    ),
    Bound(
        "staleness_of_stream",
        "topology.max_staleness",
        lambda c: Range(least=least_staleness(c)),
        "completions are older than this",
        "topology.overlap=false",
        lambda c: c.topology.overlap == "stream" and is_split(c) and "num_generations" in known(c),
    ),
    Bound(
        "checkpointed_layers_range",
        "step.checkpointed_layers",
        lambda c: Range(least=1, most=c.model.num_layers),
        "the model has fewer layers",
        "method.args.gradient_checkpointing=false for none",
    ),
    Bound(
        "filter_lengths",  # a streamed data set would be searched for ever
        "data.filter.max_tokens",
        lambda c: Range(least=c.data.filter.min_tokens or 0),
        "data.filter.min_tokens is above it, so that no row is left",
    ),
    Bound(
        "slurm_early_signal",
        "runtime.slurm.early_signal_s",
        lambda c: Range(least=c.runtime.stop_timeout_s + 1, most=65535),
        "a save may take runtime.stop_timeout_s, after this signal",
        "a smaller runtime.stop_timeout_s",
        when=lambda c: c.runtime.name == "slurm",
    ),
]
BOUND_RULES = [row.rule() for row in BOUNDS]
