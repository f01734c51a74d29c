"""profile=rocprof: the commands, and a rank under a program that stands for rocprofv3."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from launch.machine import placement
from launch.plan import process_groups
from launch.plan.planning import make_plan, prepare
from launch.schema.enums import Profile
from tests.conftest import composed, host_with
from tests.launch.execution.test_engine import fake, image_json  # noqa: F401  a fixture

ON_MI300X = (
    "hardware=mi300x",
    "model=qwen3_4b",
    "topology=single",
    "runtime=local",
    "method.args.save_strategy=no",
)
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > "$OUT/rocprof$RANK"
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def plan_of(run_dir, *overrides: str):
    config, _ = prepare(composed(*ON_MI300X, "profile=rocprof", *overrides))
    return make_plan(config, host_with(8), run_dir)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            [
                "rocprofv3",
                "--runtime-trace",
                "--stats",
                "--output-directory",
                "{profile}",
                "--output-file",
                "rank%env{RANK}%",
            ]
            + ["--output-format", "pftrace", "csv"],
        ),
        (
            ["rocprof=compute"],
            ["rocprof-compute", "profile", "--name", "run", "--path", "{profile}/rocprof-compute"],
        ),
        (
            ["rocprof=sys"],
            ["rocprof-sys-sample", "--trace", "--output", "{profile}", "rank%env{RANK}%"],
        ),
    ],
)
def test_the_plan_shows_the_profiler_around_the_rank(tmp_path, overrides, expected):
    [process] = plan_of(tmp_path, *overrides).processes
    begin = process.argv.index("--no-python") + 1
    wrapped = [word.replace("{profile}", str(tmp_path / "profile")) for word in expected]
    assert process.argv[begin:] == [
        *wrapped,
        "--",
        "python",
        "-m",
        "recipes.sft",
        "--config",
        str(tmp_path / "config.yaml"),
    ]
    assert process.argv[begin - 3 : begin - 1] == ["--nproc-per-node", "1"]


def test_two_ranks_run_under_it(tmp_path, monkeypatch):
    """torchrun, the stand-in and a program of our own in the place of a recipe.

    The GPU's rules are not asked, since there is none.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "rocprofv3").write_text(STAND_IN)
    (tools / "rocprofv3").chmod(0o755)
    (tmp_path / "program.py").write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(os.environ['OUT'], 'rank' + "
        "os.environ['RANK']).write_text(json.dumps([os.environ['WORLD_SIZE'], *sys.argv[1:]]))\n"
    )
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    composition = composed("hardware=cpu", "topology=ddp", "topology.num_gpus=2")
    config = dataclasses.replace(
        composition,
        profile=Profile.rocprof,
        method=dataclasses.replace(composition.method, program="program"),
    )
    host = dataclasses.replace(host_with(0), python=sys.executable)
    (group,) = placement.process_groups(config, host)
    argv = process_groups.ranks_argv(config, host, tmp_path, group)
    env = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == [
            "2",
            "--config",
            str(tmp_path / "config.yaml"),
        ]
        seen = (tmp_path / f"rocprof{rank}").read_text().splitlines()
        assert seen[:2] == ["--runtime-trace", "--stats"]
        assert seen[seen.index("--") + 1 :] == [
            sys.executable,
            "-m",
            "program",
            "--config",
            str(tmp_path / "config.yaml"),
        ]
