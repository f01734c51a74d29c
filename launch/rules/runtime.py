"""Define rules about images, containers and profiles."""

from __future__ import annotations

from containers import images
from launch.machine.placement import MASK
from launch.rules.rule import Rule, rule_of
from launch.schema import Config
from launch.schema.enums import Profile, Vendor
from launch.schema.trainer_args import lock
from launch.schema.variables import INSIDE

# like tunings, these start processes and wait for them
MEASURED_BY_OTHERS = ("bench/vllm", "bench/collectives")


def runtime_as(config: Config, runtime: str) -> str:
    """Return the override that selects a runtime; inside a job it is a key of runtime.slurm."""
    return f"{'runtime.slurm.inner' if config.runtime.name == 'slurm' else 'runtime'}={runtime}"


def _image_fault(config: Config) -> tuple[str, str] | None:
    name, gfx, trl = config.container.name, config.hardware.gfx, lock()["trl"]
    if config.runtime.on_node != "docker" or name == "custom":
        return None
    known = images.load()
    serving = [f"container={i.name}" for i in known.values() if gfx in i.gfx and i.trl == trl]
    custom = "container=custom container.reference=<an image of your own>"
    remedy = " or ".join([*serving, custom])
    if name == "none":
        return (
            f"{runtime_as(config, 'docker')} without an image: {config.hardware.name} has "
            f"container={config.hardware.container}",
            f"{remedy}; or {runtime_as(config, 'local')}",
        )
    if name not in known:
        return f"container={name}: no such image", f"one of {', '.join(known)}; or {custom}"
    if config.hardware.vendor != Vendor.none and gfx not in known[name].gfx:
        return f"container={name} has no code for {gfx}", remedy
    if known[name].trl != trl:
        return f"container={name} has another TRL than {trl}", remedy
    return None


def _bad_secrets(config: Config) -> list[str]:
    """Return names that are not variables, that the plan itself sets, or that user_env sets too."""
    own = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", *INSIDE, *MASK.values(), *config.user_env}
    return [name for name in config.runtime.secrets if not name.isidentifier() or name in own]


RUNTIME_RULES = [
    rule_of("image", _image_fault),
    Rule(
        "secret_names",
        lambda c: bool(_bad_secrets(c)),
        lambda c: f"runtime.secrets: {_bad_secrets(c)[0]!r} is set already, or not a name",
        "names only, for example runtime.secrets=[HF_TOKEN,MY_KEY], and the values in your shell",
    ),
    Rule(
        "profile_of_who_waits",
        lambda c: (
            c.profile != Profile.none and (c.method.tunes or c.method.name in MEASURED_BY_OTHERS)
        ),
        lambda c: f"profile={c.profile.value}: method={c.method.name} waits for what it measures",
        lambda c: (
            "no profile="
            + ("; or the experiment that the tuning writes, with it" if c.method.tunes else "")
        ),
    ),
]
