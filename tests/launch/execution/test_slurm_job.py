"""Test a Slurm job on its nodes, with programs that answer like Slurm 22.05."""

from __future__ import annotations

import os
import sys

import pytest

from launch.config.identity import composition_hash
from launch.core.errors import HostError
from launch.execution import slurm_job
from launch.execution.execute import write_inputs
from launch.execution.slurm import MASKS
from launch.execution.slurm_process import NodeProcess, step
from launch.plan import rundir
from launch.schema.enums import Vendor
from tests.helpers.slurm_examples import JOB, TWO, planned


@pytest.mark.parametrize(("vendor", "assigned", "mask"), [
    (Vendor.amd, {"ROCR": "2,3", "CUDA": "0"}, {"HIP": "2,3"}),
    (Vendor.amd, {"HIP": "5", "ROCR": "0,1"}, {"HIP": "0,1"}),  # HIP comes from the shell
    (Vendor.amd, {"HIP": "5"}, {}),
    (Vendor.nvidia, {"CUDA": "1", "ROCR": "1"}, {"CUDA": "1"}),
    (Vendor.none, {"CUDA": "0"}, {}),
])  # fmt: skip
def test_slurms_mask_becomes_the_one_that_the_launcher_reads(monkeypatch, vendor, assigned, mask):
    for name in ("HIP_VISIBLE_DEVICES", *MASKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in assigned.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    slurm_job.adopt_mask(vendor)
    masks = {name: os.environ.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "ROCR", "CUDA")}
    assert {name: value for name, value in masks.items() if value} == mask
    monkeypatch.undo()


@pytest.mark.parametrize(("squeue", "saved_more", "requeued"), [
    ("echo RUNNING", True, True),
    ("echo RUNNING", False, False),  # the job saved nothing new
    ("echo CANCELLED", True, False),
    ("", True, False),
    ("echo 'Socket timed out' >&2; exit 1", True, True),
])  # fmt: skip
def test_an_interrupted_job_is_requeued(tools, squeue, saved_more, requeued):
    tools.add("squeue", squeue)
    tools.add("scontrol", "")
    slurm_job.requeue("12", saved_more)
    assert ("scontrol requeue 12" in tools.calls()) is requeued
    tools.add("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    if requeued:
        with pytest.raises(HostError, match="presently disabled"):
            slurm_job.requeue("12", saved_more)


def test_a_node_that_starts_no_step_is_dead(tools):
    tools.add("srun", 'case "$*" in *n2*) exit 1;; esac')
    assert slurm_job.dead_nodes(["n1", "n2", "n3"]) == ["n2"]


def test_a_job_without_its_run_directory_exits_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "far,near")  # squeue would query these clusters
    assert slurm_job.main([str(tmp_path)]) == 2
    assert str(tmp_path / "config.yaml") in capsys.readouterr().err
    assert "SLURM_CLUSTERS" not in os.environ


def test_a_signal_to_srun_dumps_stacks_on_another_node(tmp_path, tools):
    """The fake srun prints a line when it receives the signal, and ends."""
    tools.add(
        "srun",
        f'exec {sys.executable} -c "import signal; signal.signal(signal.SIGUSR1, lambda *_: '
        "(print('stacks'), exit())); print('ready', flush=True); signal.pause()\"",
    )
    process, log = planned(*TWO, "topology=ddp").processes[0], tmp_path / "log"
    started = NodeProcess(step(tmp_path, process), log)
    try:
        while "ready" not in log.read_text():
            assert started.poll() is None
        assert started.dump_stacks(tmp_path / "stacks") is None, "they are in a log"
        assert "stacks" in log.read_text()
    finally:
        started.remove()


def test_the_job_plans_with_its_own_address(launch, tools, tmp_path, monkeypatch):
    assert launch(*JOB, "runtime.slurm.nodes=2", "runtime.slurm.interface=lo").code == 0
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores what node_plan() sets
        del os.environ[name]
    plan, _ = slurm_job.node_plan(run_dir)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    addresses = [p.argv[p.argv.index("--master-addr") + 1] for p in plan.processes]
    assert addresses == ["127.0.0.1"] * 2
    assert plan.processes[0].argv[0] == sys.executable


def test_ranks_of_another_node_get_the_listed_variables(launch, tools, tmp_path, monkeypatch):
    assert launch(*JOB, "runtime.slurm.nodes=2", "runtime.slurm.interface=lo").code == 0
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")
    shell = {"SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NCCL_A": "1"}
    for name, value in {**shell, "ACCELERATE_A": "1"}.items():
        monkeypatch.setenv(name, value)
    started = {}
    monkeypatch.setattr(os, "execvpe", lambda file, argv, env: started.update(env))
    slurm_job.run_process(run_dir, "trainers-1")
    assert (started["NCCL_A"], "PATH" in started) == ("1", True)
    assert not {"SLURM_JOB_ID", "MASTER_ADDR", "ACCELERATE_A"} & started.keys()


def test_a_job_reads_the_composition_that_was_submitted(tmp_path):
    tuning = "hardware=mi300x model=qwen3_4b runtime=slurm method=tune/batch topology=ddp"
    plan = planned(*tuning.split(), run_dir=tmp_path)
    rundir.make(tmp_path)
    write_inputs(plan)
    assert composition_hash(slurm_job.composition(tmp_path)) == composition_hash(plan.config)
