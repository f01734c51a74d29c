"""data.preview: a program of recipes/ that prints rows as the model will see them, on this machine's CPU, and leaves no run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.environment import ROOT
from launch.errors import EXIT_FAILED, EXIT_USER, HostError
from launch.execute import write_inputs
from launch.files import data_cache
from launch.machine.detect import Host
from launch.plan import make_plan
from launch.planner.choose import without_choices
from launch.schema import Config, Runtime


def run(config: Config, host: Host, warnings: Sequence[str], overrides: list[str]) -> int:
    """Returns the exit code. Raises HostError where this Python has no training stack: a preview runs in no container."""
    if importlib.util.find_spec("trl") is None:
        raise HostError("data.preview tokenizes with TRL, which this Python has not. Run `make setup` and use its Python.")
    local = dataclasses.replace(config, runtime=Runtime(name="local"))
    with tempfile.TemporaryDirectory(prefix="preview-") as folder:
        # Prepared where the run looks for them, which may be in a container.
        plan = dataclasses.replace(
            make_plan(local, host, Path(folder), warnings), data_cache=data_cache.for_ranks(without_choices(config), host)
        )
        write_inputs(plan, overrides)
        # As for ranks (launch/environment.py): our recipes, and none of another folder of that name.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "PYTHONSAFEPATH": "1"}
        argv = [host.python, "-m", "recipes.preview", "--config", f"{folder}/config.yaml"]
        code = subprocess.run(argv, env=env, check=False).returncode
    return code if code in (0, EXIT_USER) else EXIT_FAILED
