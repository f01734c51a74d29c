"""Find the package of a tracker, and check that wandb has a key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launch.core.errors import UserError
from launch.schema import Config

# Packages whose name differs from the tracker's in transformers' report_to. Kubeflow needs no
# package, only a variable of its jobs.
PACKAGES = {"none": None, "azure_ml": "azureml-core", "flyte": "flytekit", "kubeflow": None}
# https://docs.wandb.ai/models/track/environment-variables
KEY, MODE, HOST = "WANDB_API_KEY", "WANDB_MODE", "api.wandb.ai"
WITHOUT_A_KEY = ("offline", "dryrun", "disabled")


def package(config: Config) -> str | None:
    """Return the package that the run's tracker needs."""
    return config.tracking.package or package_of(config.tracking.name)


def package_of(tracker: str) -> str | None:
    return PACKAGES.get(tracker, tracker.replace("_", "-"))


def check_key(config: Config, environ: Mapping[str, str]) -> None:
    """Raise UserError if wandb would find no key.

    wandb cannot prompt for one, because a rank has no terminal, so it would stop the run.
    """
    # A container gets only the variables of the shell that are in runtime.secrets, and not the
    # user's home directory.
    in_container = config.runtime.on_node != "local"
    variables = {**({} if in_container else environ), **config.user_env}
    if config.tracking.name != "wandb" or variables.get(MODE) in WITHOUT_A_KEY:
        return
    other_login = variables.get("WANDB_BASE_URL") or variables.get("WANDB_IDENTITY_TOKEN_FILE")
    files = [variables["NETRC"]] if variables.get("NETRC") else ["~/.netrc", "~/_netrc"]
    paths = [Path(file).expanduser() for file in files]  # `wandb login` writes the key there
    has_key = any(HOST in path.read_text(errors="replace") for path in paths if path.is_file())
    if not in_container and (other_login or has_key):
        return
    if not environ.get(KEY) and config.runtime.name != "kubernetes":  # whose Secret has the key
        problem = f": {KEY} is not set in your shell. Use: export {KEY}=<your key>"
    elif in_container and KEY not in config.runtime.secrets:
        secrets = ",".join([*config.runtime.secrets, KEY])
        problem = f": runtime.secrets has no {KEY}. Use: runtime.secrets=[{secrets}]"
    else:
        return
    offline = f"user_env.{MODE}=offline, or tracking=tensorboard"
    raise UserError(f"tracking=wandb{problem}, {offline}.")
