"""Print rows as the model will see them (data.preview).

recipes/preview.py prepares the rows on the CPU, without a run directory.
"""

import dataclasses
import os
import subprocess
import sys
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
from launch.plan.planning import make_plan, with_commits
from launch.schema import Config, Runtime


def run(config: Config, host: Host, warnings: Sequence[str], request: Request) -> int:
    """Print the rows and return the exit code."""
    runtime = Runtime(name="local", pass_env=config.runtime.pass_env)
    local = dataclasses.replace(config, runtime=runtime)
    with tempfile.TemporaryDirectory(prefix="preview-") as folder:
        # Cache the rows where the ranks will look for them, even in a container.
        plan = dataclasses.replace(
            with_commits(make_plan(local, host, Path(folder), warnings, request), host),
            data_cache=data_cache.for_ranks(without_choices(config), host),
        )
        write_inputs(plan)
        argv = [host.python, "-m", "recipes.preview", "--config", f"{folder}/config.yaml"]
        environ = environment(plan.processes[-1])
        if (config.data.kind == "hub" or config.model.hub_id) and not _reaches_hub():
            print("The Hub cannot be reached, so its cache is used.", file=sys.stderr)
            environ["HF_HUB_OFFLINE"] = "1"  # each download would retry five times
        code = subprocess.run(argv, env=environ, check=False).returncode
    return code if code in (0, EXIT_USER) else EXIT_FAILED


def _reaches_hub() -> bool:
    import httpx  # takes 0.1 s

    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True
