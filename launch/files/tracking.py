"""What a tracker needs, by its name, whether a group of conf/tracking or tracking.name chose it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launch.errors import UserError
from launch.schema import Config

# Packages that are not named as transformers' report_to is; Kubeflow's is a variable of its jobs.
PACKAGES = {"none": None, "azure_ml": "azureml-core", "flyte": "flytekit", "kubeflow": None}
# https://docs.wandb.ai/models/track/environment-variables
KEY, MODE, HOST = "WANDB_API_KEY", "WANDB_MODE", "api.wandb.ai"
WITHOUT_A_KEY = ("offline", "dryrun", "disabled")


def package(config: Config) -> str | None:
    return config.tracking.package or package_of(config.tracking.name)


def package_of(tracker: str) -> str | None:
    return PACKAGES.get(tracker, tracker.replace("_", "-"))


def check_key(config: Config, environ: Mapping[str, str]) -> None:
    """Raises UserError where wandb would find no key: it asks for one on a terminal, which a rank has not, and ends the run."""
    in_container = config.runtime.on_node == "docker"  # which is given the secrets it lists, no other variable, and no home directory
    seen = {**({} if in_container else environ), **config.user_env}
    if config.tracking.name != "wandb" or seen.get(MODE) in WITHOUT_A_KEY:
        return
    offline = f"user_env.{MODE}=offline, or tracking=tensorboard"
    if not in_container and (seen.get("WANDB_BASE_URL") or seen.get("WANDB_IDENTITY_TOKEN_FILE") or _logged_in(seen)):
        return
    if not environ.get(KEY):
        raise UserError(f"tracking=wandb: {KEY} is not set in your shell. Use: export {KEY}=<your account's>, {offline}.")
    if in_container and KEY not in config.runtime.secrets:
        raise UserError(f"tracking=wandb in a container that is not given {KEY}. Use: {KEY} among runtime.secrets, {offline}.")


def _logged_in(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left a key."""
    files = [environ["NETRC"]] if environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    found = [file for file in (Path(given).expanduser() for given in files) if file.is_file()]
    return any(HOST in file.read_text(encoding="utf-8", errors="replace") for file in found)
