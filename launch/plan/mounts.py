"""List what a container of a run sees of the host's files."""

from pathlib import Path

from launch.core.errors import UserError
from launch.inputs import sample_files
from launch.inputs.jsonl_files import local_sets, named_files
from launch.inputs.paths import home, hub_cache, real_folder, secret_dir
from launch.inputs.tuned_files import TUNINGS
from launch.machine.detect import Host
from launch.plan import data_cache, process_env
from launch.plan.process_env import ROOT
from launch.schema import Config
from launch.schema.plan import Mount
from launch.schema.trainer_args import value_or_none

SECRETS = "/run/secrets"
OUR_PACKAGES = ("/", "opt", "recipes")  # parts of the folder where our images install packages
HUB_MODELS, HUB_DATA = "models from the Hub", "data sets from the Hub"


def mounts(config: Config, host: Host, run_dir: Path, secrets: bool) -> list[Mount]:
    """Return the container's mounts: code and inputs read-only, run directory and caches writable.

    Raises UserError for a path that would hide files of the image or expose the user's home.
    """
    writable = {
        str(run_dir): "run directory",
        str(home(config, host)): "HOME: caches of compiled kernels",
        str(data_cache.directory(config, host)) * config.method.prepares_rows: "prepared rows",
    }
    sources = [(str(ROOT), True, "code")]
    sources += [(str(Path(path)), True, reason) for path, reason in inputs(config, host)]
    sources += [(path, False, reason) for path, reason in writable.items() if path]
    # Mount the Hub's caches without the token next to them. Offline, they are read-only.
    offline = process_env.is_offline(config, host)
    hub = hub_cache(host)
    sources += [(str(hub / "hub"), offline, HUB_MODELS)]
    sources += [(str(hub / "datasets"), offline, HUB_DATA)]
    sources += [(str(hub / "xet"), False, "parts of downloads from the Hub")] * (not offline)
    for path, _, reason in sources:
        parts = Path(path).parts
        if len(parts) < 3 or parts[1] in ("proc", "sys", "dev") or parts[:3] == OUR_PACKAGES:
            raise UserError(
                f"{path} ({reason}) cannot be mounted into a container, because it would hide "
                "files of the image. Use: another directory, at least two levels deep, outside "
                "/proc, /sys, /dev and /opt/recipes."
            )
        if reason == "PYTHONPATH" and Path(path) == Path(host.home):
            raise UserError(
                "method.rewards: a container with your own reward mounts the current directory, "
                "which is your home directory. Start the run in the directory of the reward, or "
                "elsewhere with user_env.PYTHONPATH=<directory of the reward>."
            )
    mounts = [Mount(path, path, read_only, reason) for path, read_only, reason in sources]
    if secrets:
        mounts.append(Mount(str(secret_dir(host, run_dir)), SECRETS, True, "secrets"))
    return mounts  # in any order: the engine mounts parents before children


def inputs(config: Config, host: Host) -> list[tuple[str, str]]:
    """Return (path, reason) of every file and directory that the run reads."""
    data, model, method = config.data, config.model, config.method
    converter, pipeline = (value_or_none(config, name) for name in ("gguf_converter", "reuse"))
    paths = [
        (data.path, "data"),
        (data.heldout_path, "held-out data"),
        (model.path, "model"),
        (config.adapter.path, "adapter"),
        *((path, key) for key, path in named_files(config).items()),
    ]
    paths += [(str(path), key) for key, path in local_sets(config).items()]
    if data.kind == "samples" and data.path:
        files = sample_files.files(data.path)
        targets = [file for file in files if not Path(file).is_relative_to(data.path)]
        paths += [(file, "targets of links to samples") for file in targets]
    if pipeline:  # reused phases of another run are links
        links = filter(Path.is_symlink, Path(pipeline).glob("*"))
        phases = sorted(str(real_folder(link)) for link in links)
        paths += [(path, "method.args.reuse") for path in (pipeline, *phases)]
    paths += [(method.args.get("dataset"), "method.args.dataset")] if method.starts_vllm else []
    paths += [(value_or_none(config, "lm_eval_include"), "method.args.lm_eval_include")]
    if method.exports and converter:
        paths += [(str(Path(converter).parent), "llama.cpp's converter and its imports")]
    if model.path and Path(model.path).is_dir():
        # In the Hub's cache, all files of a snapshot are links to another folder.
        folder = Path(model.path).resolve()
        blobs = {file.resolve().parent for file in folder.iterdir() if file.is_symlink()}
        outside = sorted(str(blob) for blob in blobs if not blob.is_relative_to(folder))
        paths += [(path, "targets of links in the model directory") for path in outside]
    tuned = (config.user_env.get(variable) for variable in TUNINGS)
    paths += [(str(Path(file).parent), "tuned matrix products") for file in tuned if file]
    paths += [(folder, "PYTHONPATH") for folder in process_env.user_python_path(config, host)]
    return list({path: reason for path, reason in paths if path and Path(path) != ROOT}.items())
