"""profile=rocprof: the commands, and a rank under a program that stands for rocprofv3."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from launch.core.errors import HostError
from launch.execution import engine, execute
from launch.machine import placement
from launch.plan import process_groups, rocprof
from launch.plan.planning import make_plan, prepare
from launch.schema.enums import Profile, Rocprof
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


@pytest.mark.parametrize("program", Rocprof)
def test_what_to_install_is_said_before_anything_starts(tmp_path, monkeypatch, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = plan_of(tmp_path / "run", f"rocprof={program.name}")
    with pytest.raises(HostError) as raised:
        execute.check_host(plan, host_with(8))
    assert f"{program.value} is not found here. Install {rocprof.PACKAGES[program]} " in str(
        raised.value
    )
    assert "profile=torch" in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("exit_code", "found"), [(0, True), (127, False)])
def test_an_image_is_looked_into(tmp_path, fake, exit_code, found):  # noqa: F811
    config, _ = prepare(composed(*ON_MI300X[:3], "runtime=docker", "profile=rocprof"))
    plan = make_plan(config, host_with(8), tmp_path / "run")
    asked = fake(
        {
            ("GET", "/images/.*/json"): (200, image_json("rocm")),
            ("POST", "/containers/create"): (201, {"Id": "1"}),
            ("GET", "/containers/1/json"): (
                200,
                {
                    "Id": "1",
                    "HostConfig": {"LogConfig": {"Type": "json-file"}},
                    "Config": {"Tty": True},
                },
            ),
            ("POST", "/containers/1/start"): (204, b""),
            ("POST", "/containers/1/wait"): (200, {"StatusCode": exit_code}),
            ("GET", "/containers/1/logs.*"): (200, b""),
            ("DELETE", "/containers/1.*"): (204, b""),
        }
    )
    if found:
        assert engine.check(plan, host_with(8))["id"] == "sha256:1"
    else:
        with pytest.raises(
            HostError, match="rocprofv3 is not found in container=rocm. Install rocprofiler-sdk"
        ):
            engine.check(plan, host_with(8))
    assert any(line.startswith("DELETE /containers/1") for line in asked), "it is not left behind"


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
    rocprof.check(config)
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
