"""Decide which programs of containers/tools.py a run needs, and report those that are missing."""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from containers import images
from containers.tools import PRESENT, TOOLS, argv
from launch.core.errors import HostError
from launch.schema import Config
from launch.schema.enums import Profile
from launch.schema.trainer_args import value_or_none


class Need(NamedTuple):
    tool: str
    key: str  # the override that needs it
    without: str  # what happens without it; empty if the run cannot start


def needs(config: Config) -> Iterator[Need]:
    """Yield the tools that the run needs, or uses if they are there. A smoke run needs none."""
    if config.smoke:
        return
    if config.profile == Profile.rocprof:
        yield Need(config.rocprof.value, f"rocprof={config.rocprof.name}", "")
    name = config.method.name
    if name == "tune/hipblaslt":
        yield Need("hipblaslt-bench", f"method={name}", "")
    for method, argument, value, tool, without in (
        ("bench/gemm", "ops", "hipblaslt-bench", "hipblaslt-bench", "its rows are left out"),
        ("bench/collectives", "programs", "rccl-tests", "rccl-tests", "its rows are left out"),
        ("tune/inductor", "candidates", "ck", "ck4inductor", "this candidate fails"),
    ):
        if name == method and value in (value_or_none(config, argument) or []):
            yield Need(tool, f"method.args.{argument}=[{value}]", without)


def warnings(config: Config) -> Iterator[str]:
    """Yield a line for each tool that the lock does not state to be in the image."""
    image = images.load().get(config.container.name)
    if config.runtime.on_node == "local" or image is None:
        return
    for need in needs(config):
        state = image.tools.get(need.tool, images.NONE)
        if state == PRESENT:
            continue
        where = f"is not in the image {image.name}"
        if state == images.UNKNOWN:
            where = f"may be missing from the image {image.name}, whose makers do not say"
        effect = need.without or "the run then ends before it starts"
        yield f"{need.key}: {need.tool} {where}; {effect}. docs/containers.md says how to add it."


def check(config: Config, run: Callable[[list[str]], str]) -> None:
    """Raise HostError if a tool is missing without which the run cannot start.

    `run` returns the output of a command of Python where the ranks will run.
    """
    required = [need for need in needs(config) if not need.without]
    if not required:
        return
    missing = json.loads(run(argv([need.tool for need in required])))
    in_image = config.runtime.in_container
    where = f"in the image of container={config.container.name}" if in_image else "on the PATH"
    lines = [
        f"{need.key}: {need.tool} is not {where}. Install it ({TOOLS[need.tool].install}; "
        "docs/containers.md), "
        + ("or use profile=torch." if need.key.startswith("rocprof") else "or use tune/tunableop.")
        for need in required
        if need.tool in missing
    ]
    if lines:
        raise HostError("\n".join(lines))
