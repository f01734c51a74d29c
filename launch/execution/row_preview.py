"""Print rows as the model will see them (data.preview).

recipes/preview.py prepares the rows on the CPU, without a run directory.
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.config.choose import without_choices
from launch.config.request import Request
from launch.core.errors import EXIT_FAILED, EXIT_USER
from launch.execution.execute import write_inputs
from launch.execution.local import environment
from launch.machine.detect import Host
from launch.plan import data_cache
from launch.plan.planning import make_plan
from launch.schema import Config, Runtime


def run(config: Config, host: Host, warnings: Sequence[str], request: Request) -> int:
    """Print the rows and return the exit code."""
    local = dataclasses.replace(config, runtime=Runtime(name="local"))
    with tempfile.TemporaryDirectory(prefix="preview-") as folder:
        # Cache the rows where the ranks will look for them, even in a container.
        plan = dataclasses.replace(
            make_plan(local, host, Path(folder), warnings, request),
            data_cache=data_cache.for_ranks(without_choices(config), host),
        )
        write_inputs(plan)
        argv = [host.python, "-m", "recipes.preview", "--config", f"{folder}/config.yaml"]
        code = subprocess.run(argv, env=environment(plan.processes[-1]), check=False).returncode
    return code if code in (0, EXIT_USER) else EXIT_FAILED
