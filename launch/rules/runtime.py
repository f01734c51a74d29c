"""Rules about images and containers: which image serves which GPU, and keys that another runtime would ignore."""

from __future__ import annotations

import re

from containers import images
from containers.images import Image
from launch.environment import INSIDE, MASK
from launch.rules.rule import Rule
from launch.rules.slurm import SLURM_RULES
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.trainer_args import lock

# [registry[:port]/]name[/name...][:tag][@digest], as docker's own grammar has it.
REFERENCE = re.compile(
    r"(?:[\w-]+(?:\.[\w-]+)*(?::\d+)?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


def _image(config: Config) -> Image | None:
    """The entry of the lock; None for `none` and for an image of the user's own."""
    return images.load().get(config.container.name) if config.runtime.on_node == "docker" else None


def _serving(config: Config) -> list[str]:
    gfx = config.hardware.gfx
    return [i.name for i in images.load().values() if gfx in i.gfx and i.trl == lock()["trl"]]


def _does_not_serve(config: Config) -> bool:
    image = _image(config)
    return image is not None and config.hardware.vendor != Vendor.none and config.hardware.gfx not in image.gfx


def _use_serving(config: Config) -> str:
    serving = [f"container={name}" for name in _serving(config)]
    return " or ".join([*serving, "container=custom container.reference=<an image of your own>"])


def _another_trl(config: Config) -> bool:
    image = _image(config)
    return image is not None and image.trl != lock()["trl"]


def runtime_as(config: Config, runtime: str) -> str:
    """The key that starts processes so: inside a job it is a key of Slurm's."""
    return f"{'runtime.slurm.inner' if config.runtime.name == 'slurm' else 'runtime'}={runtime}"


def _docker_keys(config: Config) -> list[str]:
    """Keys with a value that only runtime=docker reads."""
    runtime = config.runtime
    return [key for key in ("network", "shm_gb", "memory_gb", "infiniband", "secrets") if getattr(runtime, key) not in (None, False, [])]


def _bad_secrets(config: Config) -> list[str]:
    """Names that are no variables, that the plan itself sets, or that user_env sets too."""
    own = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *INSIDE, *MASK.values(), *config.user_env}
    return [name for name in config.runtime.secrets if not name.isidentifier() or name in own]


RUNTIME_RULES = [
    Rule(
        "image_known",
        lambda c: c.container.name not in ("none", "custom", *images.load()),
        lambda c: f"container={c.container.name}: no such image",
        lambda c: f"one of {', '.join(images.load())}; or container=custom container.reference=<an image of your own>",
    ),
    Rule(
        "docker_without_image",
        lambda c: c.runtime.on_node == "docker" and c.container.name == "none",
        lambda c: f"{runtime_as(c, 'docker')} without an image: {c.hardware.name} has container={c.hardware.container}",
        lambda c: f"{_use_serving(c)}; or {runtime_as(c, 'local')}",
    ),
    Rule(
        "image_without_docker",
        lambda c: c.runtime.on_node == "local" and c.container.name != "none",
        lambda c: f"container={c.container.name} under {runtime_as(c, 'local')}: it would be ignored",
        lambda c: f"{runtime_as(c, 'docker')}, or container=none",
    ),
    Rule(
        "image_serves_gpu",
        _does_not_serve,
        lambda c: f"container={c.container.name} on {c.hardware.name}: it has no code for {c.hardware.gfx}",
        _use_serving,
    ),
    Rule(
        "image_trl",
        _another_trl,
        lambda c: (
            f"container={c.container.name} holds TRL {images.load()[c.container.name].trl}, and the recipes are written for "
            f"{lock()['trl']}: it is there to measure an old report's stack"
        ),
        _use_serving,
    ),
    Rule(
        "custom_reference",
        lambda c: (c.container.name == "custom") != (c.container.reference is not None),
        lambda c: f"container={c.container.name} with container.reference={c.container.reference or 'null'}",
        lambda c: "container=custom container.reference=<repository:tag or repository@sha256:...>, or neither",
    ),
    Rule(
        "docker_keys",
        lambda c: c.runtime.on_node == "local" and bool(_docker_keys(c)),
        lambda c: f"runtime.{_docker_keys(c)[0]} under {runtime_as(c, 'local')}: it would be ignored",
        lambda c: runtime_as(c, "docker"),
    ),
    Rule(
        "custom_reference_form",
        lambda c: c.container.reference is not None and not REFERENCE.fullmatch(c.container.reference),
        lambda c: f"container.reference={c.container.reference!r} names no image",
        lambda c: "repository:tag or repository@sha256:<64 hexadecimal digits>, in lower case, for example ghcr.io/me/cuda:1.0",
    ),
    Rule(
        "secret_names",
        lambda c: bool(_bad_secrets(c)),
        lambda c: f"runtime.secrets: {_bad_secrets(c)[0]!r} is no name of a variable, or one that the plan or user_env sets",
        lambda c: "names only, for example runtime.secrets=[HF_TOKEN,MY_KEY], and the values in your shell",
    ),
    *SLURM_RULES,
]
