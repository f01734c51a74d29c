"""Test which variables of the shell reach a run, and which shells cannot start one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import pytest

from launch.core.errors import HostError
from launch.execution import execute, record
from launch.execution.local import LocalProcess
from launch.plan import inherited
from launch.plan.planning import make_plan
from tests.conftest import composed, host_with

PASSES = {
    "PATH": "/bin",
    "HOME": "/h",
    "LC_ALL": "C",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
    "CC": "gcc",
    "LD_LIBRARY_PATH": "/l",
    "https_proxy": "http://p",
    "SSL_CERT_FILE": "/c",
    "HF_TOKEN": "t",
    "WANDB_API_KEY": "k",
    "OMP_PROC_BIND": "true",
    "NCCL_DEBUG": "INFO",
    "ROCBLAS_LAYER": "1",
    "HIPBLASLT_LOG_LEVEL": "1",
    "UCX_TLS": "tcp",
    "XDG_CACHE_HOME": "/x",
    "TORCH_LOGS": "+x",
    "MINE": "1",
    "ACCELERATE_MINE": "1",
}
DROPPED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "1",
    "DEEPSPEED_ZERO": "1",
    "A": "1",
    "PET_NNODES": "2",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "a",
    "LOCAL_RANK": "0",
    "TORCHELASTIC_RUN_ID": "a",
    "SLURM_PROCID": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "AWS_SECRET_ACCESS_KEY": "s",
    "PMI_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
}
PASS_MINE = "runtime.pass_env=[MINE,ACCELERATE_MINE]"


def test_a_process_gets_the_listed_variables_of_the_shell(tmp_path, monkeypatch):
    host = host_with(0, **PASSES, **DROPPED)
    for name, value in host.environ.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(composed("hardware=cpu", "runtime=local", PASS_MINE), host, tmp_path)
    (trainers,) = plan.processes
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    process = dataclasses.replace(trainers, argv=[sys.executable, "-c", code])
    started = LocalProcess(process, tmp_path / "log")
    started.wait(60)
    started.remove()
    seen = json.loads((tmp_path / "log").read_text())
    assert seen == PASSES | trainers.env | started.mark
    (warning,) = [line for line in plan.warnings if line.startswith("runtime: ")]
    assert "ACCELERATE_MIXED_PRECISION, DEEPSPEED_ZERO, FSDP_VERSION, PET_NNODES" in warning
    written = record.begin(plan, host, None)
    assert written["inherited"] == sorted(PASSES)
    assert written["environment"]["trainers"]["NCCL_DEBUG"] == "INFO"
    assert not {"HF_TOKEN", "MINE"} & written["environment"]["trainers"].keys()


def test_a_container_gets_further_variables_and_passwords_as_files():
    shell = {**PASSES, **DROPPED, "HF_ENDPOINT": "https://u:password@example.org"}
    overrides = ("hardware=cpu", "runtime=docker", PASS_MINE)
    plan = make_plan(composed(*overrides), host_with(0, **shell), Path("/runs/1"))
    (spec,) = plan.containers.values()
    files = {"HF_ENDPOINT", "HF_TOKEN", "WANDB_API_KEY", "https_proxy", "MINE", "ACCELERATE_MINE"}
    assert set(spec.secrets) == files
    assert not {*files, *DROPPED} & spec.environment.keys()
    assert (spec.environment["NCCL_DEBUG"], spec.environment["UCX_TLS"]) == ("INFO", "tcp")
    assert plan.processes[0].inherited == []


@pytest.mark.parametrize(("environ", "is_rejected"), [
    ({"WORLD_SIZE": "2", "RANK": "1"}, True),
    ({"SLURM_STEP_NUM_TASKS": "8"}, True),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
    ({"PMI_SIZE": "2"}, True),
    ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, False),  # inside an allocation
    ({"SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty
    ({"PET_NNODES": "2", "WORLD_SIZE": "1"}, False),  # a pod of Kubeflow
    ({"WORLD_SIZE": ""}, False),
])  # fmt: skip
def test_copies_of_a_command_are_rejected(tmp_path, environ, is_rejected):
    host = host_with(0, **environ)
    plan = make_plan(composed("hardware=cpu", "runtime=local"), host, tmp_path)
    if is_rejected:
        with pytest.raises(HostError, match=f"unset {next(iter(environ))}"):
            execute.check_host(plan, host)
    else:
        execute.check_host(plan, host)


@pytest.mark.parametrize(
    "line",
    [
        "hardware=cpu",
        "-m hardware=cpu seed=0,1",
        "experiment=quickstart smoke=true",
        "hardware=cpu runtime=slurm",
    ],
)
def test_every_kind_of_command_rejects_copies(launch, tools, monkeypatch, tmp_path, line):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch(*line.split()).code == 3
    assert ([*tmp_path.iterdir()], tools.calls()) == ([], [])


@pytest.mark.parametrize(("extra", "overrides", "is_rejected"), [
    (0, [], False),
    (1, [], True),
    (1, ["user_env.TMPDIR=/tmp"], False),
])  # fmt: skip
def test_a_tmpdir_too_long_for_sockets_is_rejected(extra, overrides, is_rejected):
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent) / ("d" * (inherited.MAX_TMPDIR + extra - len(parent) - 1))
        folder.mkdir()
        config = composed("hardware=cpu", "runtime=local", *overrides)
        with pytest.raises(HostError) if is_rejected else contextlib.nullcontext():
            inherited.check_tmpdir(config, {"TMPDIR": str(folder)})
