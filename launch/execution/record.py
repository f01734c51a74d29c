"""Write record.json, which makes a run reproducible. It never contains values of secrets."""

import datetime
import hashlib
import platform
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch.config.identity import composition, composition_hash, identity, identity_of
from launch.core.json_files import plain, read_json, sha256, write_json
from launch.core.packages import packages
from launch.inputs import reward_files, sample_files
from launch.inputs.jsonl_files import local_set_files, named_files
from launch.inputs.tuned_files import tuned_files
from launch.machine.detect import Host
from launch.machine.sysfs import text
from launch.plan.data_cache import TOKENIZER_FILES
from launch.plan.process_env import ROOT, secret_names
from launch.plan.sealed import seal
from launch.plan.views import image_json
from launch.schema import Config
from launch.schema.plan import Plan, Process
from launch.schema.variables import GPU_STACK


def begin(
    plan: Plan,
    host: Host,
    image: dict[str, Any] | None,
    parent: str | None = None,
    sandbox_image: str | None = None,
) -> dict[str, Any]:
    """Return the record of a run that is about to start.

    `image` is the result of check_host, and `sandbox_image` the id of the sandbox's image.
    """
    config = plan.config
    secrets = secret_names(config, host.environ) & host.environ.keys()
    secrets |= {name for spec in plan.containers.values() for name in spec.secrets}
    locks = sorted(f for f in ROOT.glob("containers/**/*.lock*") if f.is_file())
    return seal(
        {
            "schema": 1,
            "run_id": plan.run_dir.name,
            "parent": parent,
            "status": "running",
            "exit_code": None,
            "started": now(),
            "finished": None,
            "overrides": list(plan.overrides),
            "composition": composition(config),
            "composition_hash": composition_hash(config),
            "argv": {p.name: p.argv for p in plan.processes},
            "environment": {p.name: environment(plan, p, host) for p in plan.processes},
            "inherited": sorted({name for p in plan.processes for name in p.inherited}),
            "secrets": sorted(secrets),
            "code": code(),
            "packages": {} if plan.containers else packages(),  # finish() has the container's
            "locks": {str(f.relative_to(ROOT)): sha256(f) for f in locks},
            "image": image and {**(image_json(config) or {}), **image},
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
            "earlier": earlier_parts(plan),
        }
    )


def earlier_parts(plan: Plan) -> list[dict[str, Any]]:
    """Return the earlier parts of a run that resumes with other settings, such as more ranks."""
    old = read_json(plan.run_dir / "record.json")
    if old is None:
        return []
    is_same = identity(old.get("composition", {})) == identity_of(plan.config)
    part = {key: old.get(key) for key in ("composition_hash", "overrides", "finished", "metrics")}
    return [*old.get("earlier", []), *([] if is_same else [part])]


def finish(
    record: dict[str, Any],
    run_dir: Path,
    status: str,
    exit_code: int,
    metrics: list[dict[str, Any]],
    result: Any,
    restarts: int = 0,
) -> dict[str, Any]:
    """Return the complete record of a finished run."""
    files = sorted(f for f in (run_dir / "model").glob("*") if f.is_file())
    ended = {
        "status": status,
        "exit_code": exit_code,
        "finished": now(),
        "packages": read_json(run_dir / "packages.json") or record["packages"],
        "metrics": metrics[-1] if metrics else None,
        "result": result,
        "restarts": restarts,
        "outputs": {str(f.relative_to(run_dir)): sha256(f) for f in files},
    }
    return seal({**record, **ended})


def write_failure(record: dict[str, Any], run_dir: Path, exit_code: int, why: str) -> None:
    """Write the record of a run that failed in the launcher and not in its processes."""
    failed = finish(record, run_dir, "failed", exit_code, [], {"error": why})
    write_json(run_dir / "record.json", failed)


def environment(plan: Plan, process: Process, host: Host) -> dict[str, str]:
    """Return the process's variables and, without a container, the shell's that affect results."""
    spec = plan.containers.get(process.name)
    names = filter(GPU_STACK.fullmatch, process.inherited)
    environ = spec.environment if spec else {n: host.environ[n] for n in names} | process.env
    secrets = secret_names(plan.config, environ)
    return {name: value for name, value in sorted(environ.items()) if name not in secrets}


def code() -> dict[str, Any]:
    """Return the commit, whether the working tree differs from it, and a hash of the diff."""
    commit = _git("rev-parse", "HEAD").strip()
    changed = _git("diff", "HEAD") + _git("status", "--porcelain", "--untracked-files=all")
    return {
        "commit": commit or None,
        "dirty": bool(changed),
        "diff_sha256": hashlib.sha256(changed.encode()).hexdigest() if changed else None,
    }


def _git(*arguments: str) -> str:
    argv = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def model(plan: Plan) -> dict[str, Any]:
    """Return the source of the model, with a hash of each local file."""
    source = plan.config.model
    files = sorted(p for p in Path(source.path).glob("*") if p.is_file()) if source.path else []
    adapter = {file: sha256(Path(file)) for file in adapter_files(plan.config)}
    return {
        "path": source.path,
        "hub_id": source.hub_id,
        "revision": source.revision,
        "init": source.init.name,
        "files": {f.name: sha256(f) for f in files},
        **({"adapter": adapter} if adapter else {}),
    }


def adapter_files(config: Config) -> list[str]:
    """Return the files that a run reads from adapter.path.

    The tokenizer is included, because method=export copies it.
    """
    if not config.adapter.path:
        return []
    patterns, folder = ("*.safetensors", *TOKENIZER_FILES), Path(config.adapter.path)
    return sorted(str(file) for pattern in patterns for file in folder.glob(pattern))


def data_paths(plan: Plan) -> list[str]:
    """Return the existing data files, sample directories, rewards and tuned files of the run."""
    source, tuned = plan.config.data, tuned_files(plan.config).values()
    paths = [source.path, source.heldout_path, *named_files(plan.config).values(), *map(str, tuned)]
    paths += [*reward_files.sources(plan.config), *local_set_files(plan.config)]
    return [path for path in paths if path and Path(path).exists()]


def contents(paths: Iterable[str]) -> dict[str, Any]:
    """Return a hash of each file's content, and the files of each directory.

    Without the list, an added file would go unnoticed.
    """
    listed = {path: sample_files.files(path) for path in paths}
    folders = {path: files for path, files in listed.items() if files != [path]}
    files = {file: sha256(Path(file)) for files in listed.values() for file in files}
    return {"files": files, **({"folders": folders} if folders else {})}


def data(plan: Plan) -> dict[str, Any]:
    """Return hashes of the data files, the Hub revision, and the settings of generated problems."""
    source = plan.config.data
    return {
        "kind": source.kind,
        **contents(data_paths(plan)),
        "hub_id": source.hub_id,
        "revision": source.revision,
        "tasks": plain(source.tasks),
        "seed": source.seed,
    }


def machine(host: Host) -> dict[str, Any]:
    """Return facts about this machine; a fact that cannot be read is None."""
    firmware = sorted(Path("/sys/class/drm").glob("card*/device/fw_version/*"))
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
        "firmware": {str(file): text(file) for file in firmware},
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
