"""Make the folders that containers mount, without docker's SDK, whose import takes 0.25 s."""

import contextlib
from pathlib import Path

from launch.plan import container_argv
from launch.plan.mounts import HUB_DATA, HUB_MODELS
from launch.schema.plan import ContainerSpec, Process


def make_mounted(spec: ContainerSpec) -> None:
    """Create missing folders of caches and results. The engine would create them as root."""
    for mount in spec.mounts:
        if not mount.read_only or mount.reason in (HUB_MODELS, HUB_DATA):
            Path(mount.source).mkdir(parents=True, exist_ok=True)
        if mount.read_only and mount.reason == HUB_DATA:
            link_data(Path(mount.source), Path(spec.environment["HF_DATASETS_CACHE"]))


def link_data(source: Path, folder: Path) -> None:
    """Link the prepared data sets of `source` in `folder`, where `datasets` can lock them."""
    for link in folder.glob("*/*/*/*"):
        if link.is_symlink() and not link.exists():  # to a data set that was removed
            link.unlink(missing_ok=True)
    for prepared in source.glob("*/*/*/*/"):  # name/configuration/version/hash
        link = folder / prepared.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # linked before, or made here
            link.symlink_to(prepared)


def on_host(process: Process, spec: ContainerSpec) -> Process:
    """Return the process that the host starts for a container without an engine."""
    make_mounted(spec)
    return container_argv.on_host(process, spec)
