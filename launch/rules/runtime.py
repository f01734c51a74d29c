"""Define rules about images and containers."""

from __future__ import annotations

from containers import images
from containers.images import Image
from launch.machine.placement import MASK
from launch.rules.rule import Rule
from launch.rules.slurm import SLURM_RULES
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import lock
from launch.schema.variables import INSIDE


def _image(config: Config) -> Image | None:
    """Return the image's entry in the lock; None for `none` and for the user's own image."""
    return images.load().get(config.container.name) if config.runtime.on_node == "docker" else None


def _serving(config: Config) -> list[str]:
    gfx = config.hardware.gfx
    return [i.name for i in images.load().values() if gfx in i.gfx and i.trl == lock()["trl"]]


def _does_not_serve(config: Config) -> bool:
    image = _image(config)
    return (
        image is not None
        and config.hardware.vendor != Vendor.none
        and config.hardware.gfx not in image.gfx
    )


def _use_serving(config: Config) -> str:
    serving = [f"container={name}" for name in _serving(config)]
    return " or ".join([*serving, "container=custom container.reference=<an image of your own>"])


def _another_trl(config: Config) -> bool:
    image = _image(config)
    return image is not None and image.trl != lock()["trl"]


def runtime_as(config: Config, runtime: str) -> str:
    """Return the override that selects a runtime; inside a job it is a key of runtime.slurm."""
    return f"{'runtime.slurm.inner' if config.runtime.name == 'slurm' else 'runtime'}={runtime}"


def _bad_secrets(config: Config) -> list[str]:
    """Return names that are not variables, that the plan itself sets, or that user_env sets too."""
    own = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *INSIDE, *MASK.values(), *config.user_env}
    return [name for name in config.runtime.secrets if not name.isidentifier() or name in own]


RUNTIME_RULES = [
    Rule(
        "image_known",
        lambda c: c.container.name not in ("none", "custom", *images.load()),
        lambda c: f"container={c.container.name}: no such image",
        lambda c: (
            f"one of {', '.join(images.load())}; or container=custom container.reference=<an "
            "image of your own>"
        ),
    ),
    Rule(
        "docker_without_image",
        lambda c: c.runtime.on_node == "docker" and c.container.name == "none",
        lambda c: (
            f"{runtime_as(c, 'docker')} without an image: {c.hardware.name} has "
            f"container={c.hardware.container}"
        ),
        lambda c: f"{_use_serving(c)}; or {runtime_as(c, 'local')}",
    ),
    Rule(
        "image_serves_gpu",
        _does_not_serve,
        lambda c: f"container={c.container.name} has no code for {c.hardware.gfx}",
        _use_serving,
    ),
    Rule(
        "image_trl",
        _another_trl,
        lambda c: f"container={c.container.name} has another TRL than {lock()['trl']}",
        _use_serving,
    ),
    Rule(
        "custom_reference",
        lambda c: (c.container.name == "custom") != (c.container.reference is not None),
        "container=custom and container.reference need each other",
        "container=custom container.reference=<repository@sha256:...>, or neither",
    ),
    Rule(
        "secret_names",
        lambda c: bool(_bad_secrets(c)),
        lambda c: f"runtime.secrets: {_bad_secrets(c)[0]!r} is set already, or not a name",
        "names only, for example runtime.secrets=[HF_TOKEN,MY_KEY], and the values in your shell",
    ),
    *SLURM_RULES,
]
