"""record.json: what a run can be reproduced from. Secrets stand in it by name only."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import platform
import re
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch.environment import ROOT, SECRET, secret_names
from launch.files import samples
from launch.files.data_cache import TOKENIZER_FILES
from launch.files.data_files import named_files
from launch.files.rundir import read_json, sha256
from launch.files.sealed import seal
from launch.machine.detect import Host
from launch.machine.sysfs import text
from launch.plan import Plan, composition, composition_hash, identity, identity_of, image_json, plain
from launch.schema import Config
from launch.topology import Process

# Variables that change numbers or speed and hold no secret. Of any other only the name could matter, and we keep none.
ALLOWED = re.compile(r"^(HIP_|HSA_|ROCR_|CUDA_|NCCL_|RCCL_|TORCH|PYTORCH_|MIOPEN_|OMP_|MKL_|VLLM_|GPU_MAX|PYTHONHASHSEED|TOKENIZERS_)")


def begin(
    plan: Plan, host: Host, image: dict[str, Any] | None, overrides: list[str], parent: str | None, sandbox_image: str | None = None
) -> dict[str, Any]:
    """The record of a run that is about to start. `sandbox_image`: the id of the image in which it tests code, where it does."""
    return seal(
        {
            "schema": 1,
            "run_id": plan.run_dir.name,
            "parent": parent,
            "status": "running",
            "exit_code": None,
            "started": now(),
            "finished": None,
            "overrides": overrides,
            "composition": composition(plan.config),
            "composition_hash": composition_hash(plan.config),
            "argv": {p.name: p.argv for p in plan.processes},
            "environment": {p.name: _environment(plan, p, host) for p in plan.processes},
            "secrets": sorted(
                {n for n in host.environ if SECRET.search(n)} | {n for spec in plan.containers.values() for n in spec.secrets}
            ),
            "code": code(),
            "packages": packages(),
            "locks": {str(f.relative_to(ROOT)): sha256(f) for f in sorted(ROOT.glob("containers/**/*.lock*")) if f.is_file()},
            "image": image and {**(image_json(plan.config) or {}), **image},
            "sandbox_image": sandbox_image,
            "model": model(plan),
            "data": data(plan),
            "seeds": {
                "python, numpy, torch, sampler (transformers.set_seed)": plan.config.seed,
                "held-out problems": plan.config.data.seed,
            },
            "host": machine(host),
            "metrics": None,
            "result": None,
            "outputs": {},
            "earlier": _earlier(plan),
        }
    )


def _earlier(plan: Plan) -> list[dict[str, Any]]:
    """Of a run that goes on on other ranks, what it was before (launch/files/resuming.py): reproducing it takes all of its parts."""
    old = read_json(plan.run_dir / "record.json")
    if old is None:
        return []
    same = identity(old.get("composition", {})) == identity_of(plan.config)
    kept = ("composition_hash", "overrides", "finished", "metrics")
    return [*old.get("earlier", []), *([] if same else [{key: old.get(key) for key in kept}])]


def finish(
    record: dict[str, Any],
    run_dir: Path,
    status: str,
    exit_code: int,
    metrics: list[dict[str, Any]],
    result: Any,
    restarts: int = 0,
) -> dict[str, Any]:
    """The record of a run that has ended, however it ended."""
    outputs = {str(f.relative_to(run_dir)): sha256(f) for f in sorted((run_dir / "model").glob("*")) if f.is_file()}
    last = metrics[-1] if metrics else None
    ended = {"status": status, "exit_code": exit_code, "finished": now(), "metrics": last, "result": result}
    return seal({**record, **ended, "restarts": restarts, "outputs": outputs})


def _environment(plan: Plan, process: Process, host: Host) -> dict[str, str]:
    """What the process was given, and of what it inherited outside of a container the variables that change numbers or speed."""
    spec = plan.containers.get(process.name)
    inherited = {} if spec else {name: value for name, value in host.environ.items() if ALLOWED.match(name)}
    chosen = inherited | (spec.environment if spec else process.env)
    secrets = secret_names(plan.config, chosen)
    return {name: value for name, value in sorted(chosen.items()) if name not in secrets}


def code() -> dict[str, Any]:
    """Commit, whether the tree differs from it, and a hash of how."""
    commit = _git("rev-parse", "HEAD").strip()
    changed = _git("diff", "HEAD") + _git("status", "--porcelain", "--untracked-files=all")
    return {
        "commit": commit or None,
        "dirty": bool(changed),
        "diff_sha256": hashlib.sha256(changed.encode()).hexdigest() if changed else None,
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@functools.cache  # it reads a file of each: a second, for every phase of a pipeline
def packages() -> dict[str, str]:
    """Name -> version of what is installed; shared, so read it only."""
    found = (distribution.metadata for distribution in importlib.metadata.distributions())
    return dict(sorted((metadata["Name"], metadata["Version"]) for metadata in found))


def model(plan: Plan) -> dict[str, Any]:
    path = plan.config.model.path
    files = sorted(p for p in Path(path).glob("*") if p.is_file()) if path else []
    source = {"path": path, "hub_id": plan.config.model.hub_id, "revision": plan.config.model.revision, "init": plan.config.model.init.name}
    adapter = {file: sha256(Path(file)) for file in adapter_files(plan.config)}
    return {**source, "files": {f.name: sha256(f) for f in files}, **({"adapter": adapter} if adapter else {})}


def adapter_files(config: Config) -> list[str]:
    """What is read of adapter.path: weights, configuration, the base's fingerprint, and the tokenizer, which is exported with it."""
    folder = config.adapter.path and Path(config.adapter.path)
    return sorted(str(f) for pattern in ("*.safetensors", *TOKENIZER_FILES) for f in folder.glob(pattern)) if folder else []


def data_paths(plan: Plan) -> list[str]:
    """Files, and a directory of samples, that the composition's data names, of those that are there."""
    given = plan.config.data
    named = [given.path, given.heldout_path, *named_files(plan.config).values()]
    return [path for path in named if path and Path(path).exists()]


def contents(paths: Iterable[str]) -> dict[str, Any]:
    """Files by their content; of a directory also which they are, since one more, or one less, is other data."""
    listed = {path: samples.files(path) for path in paths}
    folders = {path: files for path, files in listed.items() if files != [path]}
    files = {file: sha256(Path(file)) for files in listed.values() for file in files}
    return {"files": files, **({"folders": folders} if folders else {})}


def data(plan: Plan) -> dict[str, Any]:
    """A file by its content; generated problems by what generates them (their rows' hash is in result.json)."""
    given = plan.config.data
    return {
        "kind": given.kind,
        **contents(data_paths(plan)),
        "hub_id": given.hub_id,
        "revision": given.revision,
        "tasks": plain(given.tasks),
        "seed": given.seed,
    }


def machine(host: Host) -> dict[str, Any]:
    """`None` where a fact cannot be read here."""
    return {
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "num_cores": host.num_cores,
        "gpus": [plain(gpu) for gpu in host.gpus],
        "amdgpu_driver": text("/sys/module/amdgpu/version"),
        "rocm": text("/opt/rocm/.info/version"),
        "nvidia_driver": text("/sys/module/nvidia/version"),
        "rccl": None,
        "firmware": {str(f): text(f) for f in sorted(Path("/sys/class/drm").glob("card*/device/fw_version/*"))},
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
