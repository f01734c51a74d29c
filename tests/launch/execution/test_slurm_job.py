"""Test what a Slurm job does on its nodes, by programs that answer as Slurm 22.05 does."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from launch.config.identity import composition_hash
from launch.core.errors import HostError, UserError
from launch.execution import slurm_job
from launch.execution.execute import write_inputs
from launch.execution.slurm import MASKS
from launch.execution.slurm_process import NodeProcess
from launch.machine import detect
from launch.plan import rundir
from launch.schema.enums import Vendor
from tests.helpers.slurm_examples import JOB, TWO, planned


@pytest.mark.parametrize(
    ("vendor", "given", "left"),
    [
        (Vendor.amd, {"ROCR_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "2,3"}),
        (
            Vendor.amd,
            {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"},
            {"HIP_VISIBLE_DEVICES": "0"},
        ),
        (
            Vendor.nvidia,
            {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1"},
            {"CUDA_VISIBLE_DEVICES": "1"},
        ),
        (
            Vendor.amd,
            {
                "HIP_VISIBLE_DEVICES": "5",
                "ROCR_VISIBLE_DEVICES": "0,1",
                "GPU_DEVICE_ORDINAL": "0,1",
            },
            {"HIP_VISIBLE_DEVICES": "0,1"},
        ),
        (Vendor.amd, {"HIP_VISIBLE_DEVICES": "5"}, {}),
        (Vendor.amd, {"GPU_DEVICE_ORDINAL": "3"}, {"HIP_VISIBLE_DEVICES": "3"}),
        (Vendor.amd, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}),
        (Vendor.none, {"CUDA_VISIBLE_DEVICES": "0"}, {}),
        (Vendor.amd, {}, {}),
    ],
)
def test_slurms_mask_becomes_the_one_that_is_read(monkeypatch, vendor, given, left):
    masks = ("HIP_VISIBLE_DEVICES", *MASKS)
    for name in masks:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    slurm_job.take_mask(vendor)
    assert {name: os.environ[name] for name in masks if name in os.environ} == left
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("state", "got_on", "requeued"),
    [
        ("RUNNING", True, True),
        ("RUNNING", False, False),
        ("CANCELLED", True, False),
        ("COMPLETING", True, False),
        ("", True, False),
    ],
)
def test_who_is_requeued(tools, state, got_on, requeued):
    tools.add("squeue", f"echo {state}")
    tools.add("scontrol", "")
    slurm_job.requeue("12", got_on)
    assert ("scontrol requeue 12" in tools.calls()) is requeued


def test_a_job_goes_back_though_its_state_cannot_be_asked(tools, capsys):
    tools.add("squeue", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    tools.add("scontrol", "")
    slurm_job.requeue("12", saved_more=True)
    assert "scontrol requeue 12" in tools.calls()
    assert "failed: Socket timed out" in capsys.readouterr().out


def test_a_refused_requeue_is_told(tools):
    tools.add("squeue", "echo RUNNING")
    tools.add("scontrol", "echo 'Requested operation is presently disabled for job 12' >&2; exit 1")
    with pytest.raises(HostError, match="presently disabled"):
        slurm_job.requeue("12", saved_more=True)


def test_missing_nodes_are_named(tools, tmp_path, monkeypatch, capsys):
    tools.add("scontrol", "printf 'n1\\nn2\\nn3\\n'")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    for name in ("n1", "n3"):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        slurm_job.sign(tmp_path)
    slurm_job.say_missing(tmp_path)
    assert "missing at the rendezvous: n2." in capsys.readouterr().err
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    slurm_job.sign(tmp_path)
    slurm_job.say_missing(tmp_path)
    assert capsys.readouterr().err == ""
    slurm_job.forget_nodes(tmp_path)
    assert list((tmp_path / "nodes").iterdir()) == []


def test_a_job_without_its_run_directory_says_what_it_needs(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert slurm_job.main([str(tmp_path)]) == 2
        assert slurm_job.main([]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Every node of the job must see the run directory" in capsys.readouterr().err


def test_a_job_asks_its_own_cluster(tmp_path, monkeypatch):
    """The shell may name another cluster by a variable that squeue and scontrol read too."""
    monkeypatch.setenv("SLURM_CLUSTERS", "far,near")
    with pytest.raises(UserError, match=r"config\.yaml"):
        slurm_job.launch(tmp_path)
    assert "SLURM_CLUSTERS" not in os.environ


def test_newest_step(tmp_path):
    assert slurm_job.newest_step(tmp_path) == 0
    for name in ("checkpoint-8", "checkpoint-12", ".staging"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert slurm_job.newest_step(tmp_path) == 12


def test_stacks_of_another_node_are_asked_for_by_a_signal(tmp_path, tools):
    """The srun here is a program that says which signal it got and ends."""
    tools.add(
        "srun",
        f'exec {sys.executable} -c "import signal; signal.signal(signal.SIGUSR1, lambda *_: '
        "(print('stacks'), exit())); "
        "print('ready', flush=True); signal.pause()\"",
    )
    process = planned(*TWO, "topology=ddp").processes[0]
    log = tmp_path / "log"
    started = NodeProcess(tmp_path, process, log)
    try:
        while "ready" not in log.read_text():
            assert started.poll() is None
        assert started.dump_stacks(tmp_path / "stacks") is None, "they are in a log"
        assert "stacks" in log.read_text()
    finally:
        started.remove()


def test_the_job_plans_with_its_own_address(launch, tools, tmp_path, monkeypatch):
    assert launch(*JOB, "runtime.slurm.nodes=2", "runtime.slurm.interface=lo").code == 0
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").iterdir()
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")  # undone after the test, whatever prepared() sets
    monkeypatch.setenv("MASTER_PORT", "1")
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    plan, host = slurm_job.prepared(run_dir)
    assert isinstance(host, detect.Host)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert [p.argv[p.argv.index("--master-addr") + 1] for p in plan.processes] == [
        "127.0.0.1",
        "127.0.0.1",
    ]
    assert plan.processes[0].argv[0] == sys.executable


@pytest.mark.parametrize("overrides", [["method=sft"], ["method=tune/batch", "topology=ddp"]])
def test_a_job_reads_the_composition_that_was_submitted(tmp_path, overrides):
    plan = planned(
        "hardware=mi300x", "model=qwen3_4b", "runtime=slurm", *overrides, run_dir=tmp_path
    )
    rundir.make(tmp_path)
    write_inputs(plan)
    assert composition_hash(slurm_job.composition(tmp_path)) == composition_hash(plan.config)
