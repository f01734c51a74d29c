"""Test runs in which a rank or a vLLM server dies or hangs, on a CPU. faults.py makes them fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from launch.core import json_files
from launch.execution import orphans
from tests.conftest import ROOT, command
from tests.helpers.supervised import eventually
from tests.integration.conftest import skip_without, started, wait_until

pytestmark = pytest.mark.integration

SMALL = """
hardware=cpu method=grpo model=tiny precision=fp32 data.num_train=64 tracking=none
+method.rewards={faults.reward:1.0} method.reward_confined=false method.args.num_generations=4
method.args.per_device_train_batch_size=4 method.args.lr_scheduler_type=constant
method.args.warmup_steps=0
""".split()
# Large enough that one step changes the server's log-probabilities measurably.
SMALL.append("method.args.learning_rate=3e-5")
TWO_RANKS = """
topology=ddp hardware.gpus_per_node=2 topology.num_gpus=2 model.num_layers=1
method.args.max_completion_length=6 method.args.max_steps=6 method.args.save_steps=2
""".split()
# Metrics that differ between equal runs.
TIMED = set(
    """
        time_s step_s tokens_per_second tokens_per_second_per_gpu tflops_per_gpu mfu memory_peak_gb
        samples_per_second memory_allocated_gb memory_reserved_gb
        generation_s wait_s sync_s reward_s train_s
    """.split()
)
KILLED = "failed: killed by signal 9 (SIGKILL)\nLast lines of"
MEANS = "This usually means: the host's memory is full (`dmesg | grep -i oom`"
ROUNDING = 1e-4  # largest difference between the trainer's and vLLM's fp32 log-probabilities
ENDS_WITHIN_S = 900  # timeout of a run on two busy cores


@pytest.fixture
def folder(tmp_path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path, plugin: bool = False) -> Path:
    """Return a working directory for a launcher, in which faults.py can be imported."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/integration/faults.py", folder)
    if plugin:
        metadata = folder / "faults-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nfaults = faults:register\n"
        )
    return folder


def processes(folder: Path) -> list[int]:
    """Return the pids of runs whose working directory is `folder`."""
    return [pid for pid in orphans.marked({}) if working_directory(pid) == str(folder)]


def working_directory(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:  # the process has just ended
        return None


def computed(run: Path) -> list[dict]:
    """Return metrics.jsonl without times."""
    return [
        {key: value for key, value in row.items() if key not in TIMED}
        for row in json_files.read_metrics(run / "metrics.jsonl")
    ]


def only_run(folder: Path) -> Path:
    (record,) = folder.glob("runs/*/[0-9]*/record.json")
    return record.parent


# ---- Ranks without a server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    folder = prepared(tmp_path_factory.mktemp("undisturbed"))
    done = command(*SMALL, *TWO_RANKS, cwd=folder, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return computed(only_run(folder))


def test_run_after_faults_equals_undisturbed_run(folder, undisturbed):
    """Hang before the first checkpoint, then kill a rank, and then the launcher."""
    run_until_hang(folder)
    # Fault, step from which the run resumes, exit code, message.
    for fault, resumed, code, words in [
        ("first 4", 0, 4, [f"trainers, rank 0 {KILLED}", MEANS]),
        ("lose 5", 2, -signal.SIGKILL, []),
        ("", 5, 0, ["done: 6 steps"]),
    ]:
        (folder / "fault").write_text(fault)
        done = command(*SMALL, *TWO_RANKS, cwd=folder, timeout=ENDS_WITHIN_S)
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        assert all(word in output for word in words), output
        assert eventually(lambda: processes(folder) == []), f"{fault}: processes are left"
        assert not fault or not (folder / "fault").exists(), f"{fault} did not happen"
        checkpoint = only_run(folder) / f"checkpoints/checkpoint-{resumed}"
        assert (f"resuming from {checkpoint}\n" in output) == (resumed > 0), output
    assert computed(only_run(folder)) == undisturbed
    assert undisturbed[0]["reward_std"] > 0
    assert [row["step"] for row in undisturbed] == list(range(1, 7))


def run_until_hang(folder: Path) -> None:
    """Make a rank hang in the second step.

    The test touches the heartbeat until then, so that slow imports do not exceed the timeout.
    """
    (folder / "fault").write_text("hang 2")
    short = ["runtime.hang_timeout_s=10", "runtime.stop_timeout_s=2"]
    launcher = started(*SMALL, *TWO_RANKS, *short, cwd=folder)
    try:
        wait_until(lambda: launcher.poll() is not None or not beat_before_fault(folder))
        code, output = launcher.wait(ENDS_WITHIN_S), (folder / "output").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 5, output
    assert not (folder / "fault").exists()
    run = only_run(folder)
    assert "trainers hung: no step, token or loading progress for 1" in output
    assert f"stacks of trainers are in {run / 'stacks'}" in output
    # Without permission for py-spy, each rank writes its stacks into its log. Children of a rank
    # have files with its number too.
    for rank, function in ((1, "hang_here"), (0, "gather")):
        stacks = "".join(file.read_text() for file in (run / "stacks").glob(f"rank{rank}-*.txt"))
        log = (run / f"logs/rank{rank}.log").read_text()
        assert function in stacks or ("so the stacks are in" in stacks and function in log)
    assert json.loads((run / "record.json").read_text())["status"] == "hung"
    assert processes(folder) == []


def beat_before_fault(folder: Path) -> bool:
    """Touch the run's heartbeat, and return whether the fault has not happened yet."""
    for record in folder.glob("runs/*/[0-9]*/record.json"):
        (record.parent / "heartbeat").touch()
    return (folder / "fault").exists()


# ---- A server and its trainers

SPLIT = """
topology=split hardware.vllm=true topology.server_max_length=256 model.num_layers=2
method.args.save_steps=2 hardware.gpus_per_node=3 topology.num_gpus=3
""".split()
# Each kill needs a restart. On GPUs, two processes answer requests by default.
STREAM = """
topology.overlap=stream topology.max_staleness=4 runtime.max_restarts=3 method.args.max_steps=6
method.args.max_completion_length=32 topology.server_args.api_server_count=2
""".split()
TWO_SERVERS = [
    "topology.overlap=true",
    "topology.servers=2",
    "method.args.max_steps=3",
    "method.args.max_completion_length=16",
]
ARRIVE = "weights reach the server: "


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")


def test_stream_survives_kills(vllm, tmp_path):
    """Kill a rank, then the server during a weight transfer, then a rank in the last step.

    Two ranks train with two generations in flight. They finish their step without the server. All
    processes restart together.
    """
    folder = prepared(tmp_path, plugin=True)
    # The first three transfers are those of the check, followed by one per step.
    (folder / "fault").write_text("first 1\nsync 6\nfirst 6")
    done = command(*SMALL, *SPLIT, *STREAM, cwd=folder, timeout=ENDS_WITHIN_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert processes(folder) == []
    assert not (folder / "fault").exists()
    starts = re.split(r"restart \d of 3, from ", output)
    assert len(starts) == 4, output
    killed_rank, killed_server, killed_last, last = starts
    for killed in (killed_rank, killed_last):
        assert f"trainers, rank 0 {KILLED}" in killed, output
        assert "server failed" not in killed
    dies = "\nserver failed: Worker proc VllmWorker-0 died unexpectedly (exit code: "
    assert dies in killed_server
    assert "trainers failed" not in killed_server
    assert all(MEANS in killed for killed in starts[:3])
    assert all(ARRIVE in started for started in starts)
    run = only_run(folder)
    assert f"resuming from {run / 'checkpoints/checkpoint-3'}\n" in killed_last
    assert f"resuming from {run / 'checkpoints/checkpoint-4'}\n" in last
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["restarts"]) == ("done", 3)

    rows = json_files.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    oldest = {row["step"]: row["staleness/max"] for row in rows}
    assert max(oldest.values()) <= 4
    # After a start, the server has the trainers' weights.
    assert oldest[1] == oldest[4] == oldest[5] == 0
    difference = {row["step"]: row["sampling/sampling_logp_difference/mean"] for row in rows}
    assert difference[1] < ROUNDING < max(difference.values()) < 0.05, difference
    assert max(abs(row["sampling/importance_sampling_ratio/mean"] - 1) for row in rows) < 0.5
    seconds = ("wait_s", "sync_s", "reward_s", "train_s")
    assert min(row[name] for row in rows for name in ("reward_std", "grad_norm", *seconds)) > 0
    # Steps without a checkpoint are repeated after a kill, so compare the last repetition.
    trained = dict(json.loads(line) for line in (folder / "trained").read_text().splitlines())
    assert sorted(trained) == list(range(1, 7))
    assert len({json.dumps(prompts) for prompts in trained.values()}) == 6


def test_run_with_two_servers_ends_with_failed_rank(vllm, folder):
    """Kill the rank in the last step. The server's weights are one step old after the first."""
    (folder / "fault").write_text("first 3")
    done = command(*SMALL, *SPLIT, *TWO_SERVERS, cwd=folder, timeout=ENDS_WITHIN_S)
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert "weights reach all 2 replicas of the server: " in output
    assert "server failed" not in output
    assert f"trainers {KILLED}" in output
    assert MEANS in output
    run = only_run(folder)
    first, second = (
        row["sampling/sampling_logp_difference/mean"]
        for row in json_files.read_metrics(run / "metrics.jsonl")
    )
    assert first < ROUNDING < second < 0.05
    assert json.loads((run / "record.json").read_text())["status"] == "failed"
    assert processes(folder) == []


def test_sharded_trainers_send_their_weights(vllm, folder):
    """A forward pass without a backward pass leaves some of FSDP2's weights gathered."""
    sharded = ["topology.strategy=fsdp", "method.args.max_steps=2", "topology.overlap=stream"]
    done = command(*SMALL, *SPLIT, *sharded, cwd=folder, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ARRIVE in done.stdout + done.stderr
    rows = json_files.read_metrics(only_run(folder) / "metrics.jsonl")
    assert rows[0]["sampling/sampling_logp_difference/mean"] < ROUNDING
    assert len(rows) == 2
