"""Find the files of tuned matrix products that a run reads, by their variables in user_env."""

from __future__ import annotations

import re
from pathlib import Path

from launch.core.errors import UserError
from launch.schema import Config

TUNABLEOP, HIPBLASLT = "PYTORCH_TUNABLEOP_FILENAME", "HIPBLASLT_TUNING_OVERRIDE_FILE"
TUNINGS = {TUNABLEOP: "tune/tunableop", HIPBLASLT: "tune/hipblaslt"}


def tuned_files(config: Config) -> dict[str, Path]:
    """Return the first file that each variable makes a run read."""
    env = config.user_env
    files = {HIPBLASLT: Path(env[HIPBLASLT])} if env.get(HIPBLASLT) else {}
    if (name := env.get(TUNABLEOP)) and env.get("PYTORCH_TUNABLEOP_TUNING") == "0":
        # PyTorch replaces %d by the GPU's number, or inserts the number before the suffix.
        numbered = re.sub(r"(\.[^.]*)?$", r"0\1", name, count=1)
        files[TUNABLEOP] = Path(name.replace("%d", "0") if "%d" in name else numbered)
    return files


def check_tuned_files(config: Config) -> None:
    """Check that the files exist, because the libraries silently run untuned without them."""
    for variable, file in tuned_files(config).items():
        value = config.user_env[variable]
        if not Path(value).is_absolute() or not file.is_file():
            raise UserError(
                f"user_env.{variable}={value}: {file} is not the absolute path of a file. Use: "
                f"the path that method={TUNINGS[variable]} printed."
            )
