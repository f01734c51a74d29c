"""Describe whether this machine has a run's image and weights.

This needs neither a network nor docker's SDK, so plans stay quick. A run pulls or downloads what is
missing.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from containers import images
from launch.core import docker_host
from launch.inputs import paths
from launch.machine import container_engine
from launch.machine.detect import Host
from launch.plan.container import image_reference
from launch.plan.container_argv import sif
from launch.plan.predictions import download_gb, gigabytes
from launch.schema import Config

WEIGHTS = (".safetensors", ".bin")


def engine(config: Config, host: Host) -> str | None:
    """Return which engine runs the containers and what it costs; None for docker as root."""
    uses_engine = config.runtime.on_node == "docker"
    found = container_engine.engine(host.environ) if uses_engine else None
    if found is None or str(found) == f"docker {found.version}":
        return None
    if not found.rootless:
        return str(found)
    costs = f"{found}: limits of memory locks and files are at most yours (ulimit -H)"
    if remedy := container_engine.groups_remedy(found, host):
        costs += f"; containers lack your groups, which may open the GPUs. Use: {remedy}"
    return costs


def image(config: Config, host: Host) -> str | None:
    """Return the run's image and whether this machine has it; None without containers."""
    if config.runtime.on_node == "apptainer":
        file = sif(config, host, image_reference(config))
        missing = "; the program `apptainer` is not on the PATH" * (not shutil.which("apptainer"))
        state = "in" if file.exists() else "not yet in"
        return f"{image_reference(config)}: {state} {file}{missing}"
    if config.runtime.on_node == "pyxis":
        return f"{image_reference(config)}: imported on the nodes"
    if config.runtime.on_node != "docker":
        return None
    reference, own = image_reference(config), _local_image(config)
    gb = container_engine.image_gb(reference, docker_host.address(host.environ))
    if gb:
        return f"{reference}: on this machine, {gb:.3g} GB"
    state = "not built yet" if own else "not on this machine; the run pulls it"
    if gb is None:
        state = "not checked (no docker engine)"
    if own:
        gb_text = f"{own.download_gb} GB to download"
        state += f"; base {'size not published' if own.download_gb == images.UNKNOWN else gb_text}"
    return f"{reference}: {state}"


def build_command(config: Config, host: Host) -> str | None:
    """Return the command that builds the run's image; None if it is here or is not built here."""
    own, address = _local_image(config), docker_host.address(host.environ)
    if own is None or docker_host.problem(address):
        return None
    is_apptainer = config.runtime.on_node == "apptainer"
    is_converted = is_apptainer and sif(config, host, own.reference).exists()
    if is_converted or container_engine.image_gb(own.reference, address):
        return None
    return f"python containers/build.py image={own.name}"


def engine_problems(config: Config, host: Host) -> Iterator[str]:
    """Yield why docker's engine cannot run the image here, or has no space for it."""
    own, address = images.load().get(config.container.name), docker_host.address(host.environ)
    if config.runtime.name != "docker":
        return
    if problem := docker_host.problem(address):
        yield problem
    if own is None or host.disk_free is None:
        return
    references = (own.reference, own.base_reference)
    has_image = any(container_engine.image_gb(name, address) for name in references)
    folder = None if has_image else docker_host.folder(address)
    if folder and (problem := own.space_problem(folder, host.disk_free(folder) / 1e9)):
        yield problem


def _local_image(config: Config) -> images.Image | None:
    """Return the entry of an image that each machine builds itself; None for any other."""
    own = images.load().get(config.container.name)
    is_local = own is not None and own.reference == own.local_reference
    return own if is_local and config.runtime.on_node in ("docker", "apptainer") else None


def weights(config: Config, host: Host) -> str | None:
    """Return whether the Hub's weights are in the cache; None if the run needs none of the Hub."""
    model = config.model
    if not model.hub_id or not download_gb(config):
        return None
    gb = _cached_gb(model.hub_id, model.revision or "main", host)
    if gb:
        return f"{model.hub_id}: in the cache, {gigabytes(gb)} GB"
    gb = download_gb(config)
    terms = "; gated: accept its license on the Hub, then export HF_TOKEN" if model.gated else ""
    return f"{model.hub_id}: not in the cache, up to {gigabytes(gb, 2)} GB to download{terms}"


def _cached_gb(hub_id: str, revision: str, host: Host) -> float:
    """Return the size of a model's weights in the cache, or 0 if a file is missing."""
    cache = Path(host.environ.get("HF_HUB_CACHE") or paths.hub_cache(host) / "hub")
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        ref = folder / "refs" / revision
        snapshot = folder / "snapshots" / (ref.read_text() if ref.is_file() else revision)
        names = [name for name in os.listdir(snapshot) if name.endswith(WEIGHTS)]
        for index in snapshot.glob("*.index.json"):
            names = [*{*json.loads(index.read_text())["weight_map"].values()}]
        return sum((snapshot / name).stat().st_size for name in names) / 1e9
    return 0.0
