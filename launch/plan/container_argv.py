"""Render containers as commands: Apptainer's, or srun's with the plugin pyxis.

These containers need no engine. They share the host's network, devices, /dev/shm and process ids,
so a server and its trainers reach each other, and a GPU mask has the host's numbers.
"""

import csv
import dataclasses
import hashlib
import io
from pathlib import Path

from launch.core.errors import UserError
from launch.inputs import paths
from launch.machine.detect import Host
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.plan import ContainerSpec, Mount, Process, Setting

# Add the GPU's device nodes, which some sites withhold, and the driver's libraries. For AMD these
# are only libdrm and tools (Apptainer's rocmliblist.conf), so the image keeps its own ROCm.
GPU_FLAGS = {Vendor.amd: ["--rocm"], Vendor.nvidia: ["--nv"]}
# variables of Slurm that would contradict the plan's GPU mask
UNSET = [part for name in ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL") for part in ("-u", name)]

# Of these, enroot needs your own values, for its configuration and cache.
OWN = ("HOME", "USER", "LOGNAME")


def sif(config: Config, host: Host, reference: str) -> Path:
    """Return the file that Apptainer starts: converted from an image, or the user's own."""
    if reference.startswith("/"):
        return Path(reference)
    digest = hashlib.sha256(reference.encode()).hexdigest()[:12]
    return paths.cache_dir(host) / f"rocm-recipes/sif/{config.container.name}-{digest}.sif"


def prefix(config: Config, host: Host, spec: ContainerSpec, process: Process) -> list[str]:
    """Return the part of the command before the one that runs in the container.

    Raises UserError for a path that pyxis cannot mount.
    """
    if config.runtime.on_node == "apptainer":
        return [
            # Without home and cwd, the container sees only the mounts below and /tmp. Root gets no
            # capabilities, as with docker.
            *["apptainer", "exec", "--no-privs", "--no-mount=home,cwd"],
            *GPU_FLAGS.get(config.hardware.vendor, []),
            f"--home={paths.home(config, host)}",
            f"--pwd={ROOT}",
            *(f"--mount={_mount(mount)}" for mount in spec.mounts),
            str(sif(config, host, spec.image)),
        ]
    for mount in spec.mounts:
        if set(mount.source) & set(",:"):
            raise UserError(
                f"{mount.source} ({mount.reason}): pyxis cannot mount a path with a comma or a "
                "colon. Use: another directory, or runtime.slurm.container=apptainer."
            )
    mounts = [f"{m.source}:{m.target}{':ro' * m.read_only}" for m in spec.mounts]
    passed = [name for name in (*spec.environment, *spec.secrets) if name not in OWN]
    return [
        *srun(process),
        # By default, enroot starts a login shell, whose /etc/profile replaces the PATH of images
        # of Debian.
        f"--export={','.join([*passed, *OWN, 'PATH', 'ENROOT_LOGIN_SHELL=no'])}",
        f"--container-image={spec.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={ROOT}",
        # By default, the image's values would take precedence.
        f"--container-env={','.join(passed)}",
        *["--no-container-mount-home", "--no-container-entrypoint", "--no-container-remap-root"],
        *["env", *UNSET, *(f"{name}={spec.environment[name]}" for name in OWN)],
    ]


def _mount(mount: Mount) -> str:
    """Return a value of --mount, which is a row of CSV. --bind cannot quote commas and colons."""
    fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(fields + ["ro"] * mount.read_only)
    return row.getvalue()


def srun(process: Process) -> list[str]:
    """Return an srun command for the process's node with all of the job's cores."""
    step = ["srun", "--nodes=1", "--ntasks=1", f"--relative={process.node}"]
    return [*step, "--cpu-bind=none", "--unbuffered", f"--job-name={process.name}"]


def on_host(process: Process, spec: ContainerSpec) -> Process:
    """Return the process that the host starts for a container of this module."""
    argv, is_srun = [*spec.prefix, *spec.command], spec.prefix[0] == "srun"
    variables = {n: v for n, v in spec.environment.items() if not (is_srun and n in OWN)}
    settings = [Setting(name, value, "", "launcher") for name, value in variables.items()]
    return dataclasses.replace(process, argv=argv, settings=settings, inherited=["PATH"])
