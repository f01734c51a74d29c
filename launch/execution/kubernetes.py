"""Render the manifest of a Kubernetes Job for one node (runtime=kubernetes).

The pod runs the same command with runtime=local. It has a single container, because a device plugin
gives a container only its own GPUs, and the weight transfer of topology=split needs those of its
peers (launch/plan/container.py: peer_gpus).
"""

import hashlib
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from launch.config.request import Request
from launch.core.errors import EXIT_INTERRUPTED, UserError
from launch.inputs.paths import image_folder
from launch.machine import placement
from launch.machine.detect import Host
from launch.plan import plan_page
from launch.plan.container import image_reference
from launch.plan.mounts import inputs
from launch.plan.process_env import ROOT, container_variables, passed_to_containers
from launch.schema import Config
from launch.schema.enums import Mode, Vendor
from launch.schema.plan import Plan

MOUNT = "/workspace"  # where the claim is mounted
CODE = f"{MOUNT}/rocm-recipes"
# Names of the device plugins of AMD (ROCm/k8s-device-plugin) and NVIDIA (NVIDIA/k8s-device-plugin)
RESOURCES = {Vendor.amd: "amd.com/gpu", Vendor.nvidia: "nvidia.com/gpu"}
# Keys that the manifest contains in another form, or that the launcher in the pod must not see.
REPLACED = re.compile(
    r"\+*(mode|format|hardware|container(\..*)?"
    r"|runtime(\.(kubernetes|secrets|pass_env|shm_gb|memory_gb)(\..*)?)?)="
)
SAVE_RECORD_S = 60  # after stop_timeout_s, until the launcher has written the record
MAX_NAME = 63  # of a Job, whose name is also a label


def check(config: Config, host: Host, request: Request) -> None:
    """Raise UserError for a path that is not in the claim, and unless the command only plans."""
    if config.runtime.name != "kubernetes":
        return
    folders = {"data.cache": config.data.cache}
    if "run_root" in request.keys:  # the pod has its own default
        folders["run_root"] = config.run_root
    if config.resume not in ("auto", "never"):
        folders["resume"] = config.resume
    used = [*inputs(config, host), *((path, key) for key, path in folders.items() if path)]
    used += [(path, "hydra.searchpath") for path in request.searched]
    for path, reason in used:
        target = os.path.normpath(os.path.join(working_directory(host), in_pod(path)))
        if not Path(target).is_relative_to(MOUNT):
            raise UserError(
                f"{path} ({reason}): a pod sees only the claim, which is mounted at {MOUNT}. "
                f"Use: a path in the repository {ROOT}, which is {CODE} in the pod, or start the "
                "command there."
            )
    if config.mode == Mode.run:
        (command,) = plan_page.next_command(request, config, host)
        raise UserError(
            f"runtime=kubernetes: the launcher renders a manifest and starts no pod. {command}"
        )


def working_directory(host: Host) -> str:
    """Return the pod's counterpart of the current directory, or the repository."""
    is_inside = Path(host.cwd).is_relative_to(ROOT)
    return os.path.normpath(f"{CODE}/{os.path.relpath(host.cwd, ROOT) if is_inside else ''}")


def in_pod(text: str) -> str:
    """Replace the repository's path in an override by its path in the pod."""
    return text.replace(f"{ROOT}/", f"{CODE}/")


def literal(text: str) -> str:
    """Protect text from Kubernetes, which expands $(NAME) in commands and values."""
    return text.replace("$", "$$")


def secret_names(config: Config) -> list[str]:
    return sorted({*config.runtime.secrets, *config.runtime.pass_env})


def command(plan: Plan) -> list[str]:
    """Return the command of the pod's launcher."""
    config = plan.config
    overrides = [in_pod(o) for o in plan.overrides if not REPLACED.match(o)]
    argv = ["python3", f"{CODE}/launch/run.py", *overrides, f"hardware={config.hardware.name}"]
    argv += ["runtime=local", "container=none"]
    names = secret_names(config)
    return [*argv, f"runtime.pass_env=[{','.join(names)}]"] if names else argv


def environment(plan: Plan, host: Host) -> Iterator[dict[str, Any]]:
    """Yield the container's variables. Secrets are references, so their values are not read."""
    config = plan.config
    home = f"{MOUNT}/home/{image_folder(config)}"
    variables = container_variables(home, f"{MOUNT}/huggingface")
    for name, value in sorted({**variables, **passed_to_containers(config, host)}.items()):
        yield {"name": name, "value": literal(value)}
    for name in secret_names(config):
        key = {"name": config.runtime.kubernetes.secret, "key": name}
        yield {"name": name, "valueFrom": {"secretKeyRef": key}}


def manifest(plan: Plan, host: Host) -> dict[str, Any]:
    """Return the Job of a plan."""
    config, argv = plan.config, command(plan)
    # Other commands get other names, because a Job's template cannot change.
    suffix = hashlib.sha256(shlex.join(argv).encode()).hexdigest()[:8]
    stem = re.sub(r"[^a-z0-9]+", "-", plan.name.lower())[: MAX_NAME - len(suffix) - 1]
    name, on_amd = f"{stem.strip('-') or 'run'}-{suffix}", config.hardware.vendor == Vendor.amd
    limits: dict[str, Any] = {}
    if (resource := RESOURCES.get(config.hardware.vendor)) and not config.method.exports:
        limits[resource] = placement.num_gpus(config)
    if config.runtime.memory_gb:
        limits["memory"] = f"{config.runtime.memory_gb:g}G"
    container = {
        "name": "launcher",
        "image": image_reference(config),
        "command": [*map(literal, argv)],
        "workingDir": working_directory(host),
        "env": list(environment(plan, host)),
        "resources": {"limits": limits},  # for GPUs, requests follow from limits
        # As in AMD's example of a pod without privileges (ROCm/k8s-device-plugin,
        # example/pod/pytorch-non-privileged.yaml). The default profile of seccomp blocks NUMA calls
        # of ROCm's allocators (launch/plan/container.py: security). Root owns the device nodes;
        # other users would need the gid of the node's group render (k8s-device-plugin#39).
        "securityContext": {
            "runAsUser": 0,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "seccompProfile": {"type": "Unconfined" if on_amd else "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "workspace", "mountPath": MOUNT},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    shm = {"medium": "Memory", "sizeLimit": f"{config.runtime.shm_gb or 16.0:g}G"}
    claim = {"claimName": config.runtime.kubernetes.claim}
    pod = {
        "restartPolicy": "Never",  # required by podFailurePolicy
        "terminationGracePeriodSeconds": config.runtime.stop_timeout_s + SAVE_RECORD_S,
        "shareProcessNamespace": True,  # as PID 1, the launcher would not reap orphans
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": claim},
            {"name": "shm", "emptyDir": shm},
        ],
    }
    # A pod that was interrupted (drained, preempted, lost with its node) is replaced and resumes.
    # After any other failure, the Job fails; runtime.max_restarts applies inside the pod.
    interrupted = {"containerName": "launcher", "operator": "In", "values": [EXIT_INTERRUPTED]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": interrupted},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": pod},
        },
    }


def as_yaml(plan: Plan, host: Host) -> str:
    return str(yaml.safe_dump(manifest(plan, host), sort_keys=False, width=math.inf))
