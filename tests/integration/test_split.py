"""Test runs of several real processes on a CPU, of which one dies or hangs.

Ranks alone come first, then a vLLM server with its trainers. faults.py makes them fail.
"""

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
from tests.integration.conftest import lacking, started, wait_until

pytestmark = pytest.mark.integration

SMALL = """
hardware=cpu method=grpo model=tiny precision=fp32 data.num_train=64 tracking=none
+method.rewards={faults.reward:1.0} method.reward_confined=false method.args.num_generations=4
method.args.per_device_train_batch_size=4 method.args.lr_scheduler_type=constant
method.args.warmup_steps=0
""".split()
# Weights that move enough in one step for the server's log-probabilities to show it.
SMALL.append("method.args.learning_rate=3e-5")
TWO_RANKS = """
topology=ddp hardware.gpus_per_node=2 topology.num_gpus=2 model.num_layers=1
method.args.max_completion_length=6 method.args.max_steps=6 method.args.save_steps=2
""".split()
# What differs between two runs of the same computation.
TIMED = set(
    """
        time_s step_s tokens_per_second tokens_per_second_per_gpu tflops_per_gpu mfu memory_peak_gb
        generation_s wait_s sync_s reward_s train_s
    """.split()
)
KILLED = "failed: killed by signal 9 (SIGKILL)\nLast lines of"
MEANS = (
    "This usually means: the host's memory is full "
    "(`dmesg | grep -i oom` shows what the kernel killed), or someone killed the process."
)
ROUNDING = 1e-4  # of log-probabilities in fp32, computed here and by vLLM
ENDS_WITHIN_S = 900  # of a run on two cores that do something else too


@pytest.fixture
def folder(tmp_path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path, plugin: bool = False) -> Path:
    """Return a folder to start a launcher in, where the reward of faults.py is importable."""
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
    """Return the processes of runs that were started here."""
    return [pid for pid in orphans.marked({}) if working_directory(pid) == str(folder)]


def working_directory(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:  # it has just ended
        return None


def computed(run: Path) -> list[dict]:
    """Return metrics.jsonl without what depends on a clock."""
    return [
        {key: value for key, value in row.items() if key not in TIMED}
        for row in json_files.read_metrics(run / "metrics.jsonl")
    ]


def only_run(folder: Path) -> Path:
    (record,) = folder.glob("runs/*/*/record.json")
    return record.parent


# ---- Ranks alone


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    folder = prepared(tmp_path_factory.mktemp("undisturbed"))
    done = command(*SMALL, *TWO_RANKS, cwd=folder, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return computed(only_run(folder))


def test_a_run_that_hangs_and_is_killed_computes_what_an_undisturbed_one_does(folder, undisturbed):
    """Hang before there is a checkpoint, then lose a rank and then the launcher."""
    hangs(folder)
    # Fault, step it begins after, exit code, message.
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


def hangs(folder: Path) -> None:
    """Have a rank hang in the second step.

    The heart beats for the imports here, which are silent for as long as a busy machine needs. So
    the timeout need not allow for them.
    """
    (folder / "fault").write_text("hang 2")
    short = ["runtime.hang_timeout_s=10", "runtime.stop_timeout_s=2"]
    launcher = started(*SMALL, *TWO_RANKS, *short, cwd=folder)
    try:
        wait_until(lambda: launcher.poll() is not None or not beats(folder))
        code, output = launcher.wait(ENDS_WITHIN_S), (folder / "output").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 5, output
    assert not (folder / "fault").exists()
    run = only_run(folder)
    assert "trainers hung: no step, token or loading progress for 1" in output
    assert f"stacks of trainers are in {run / 'stacks'}" in output
    # If py-spy is not permitted, each rank writes its stacks into its log. Children of a rank have
    # files with its number too.
    for rank, stands in ((1, "hang_here"), (0, "gather")):
        stacks = "".join(file.read_text() for file in (run / "stacks").glob(f"rank{rank}-*.txt"))
        log = (run / f"logs/rank{rank}.log").read_text()
        assert stands in stacks or ("so the stacks are in" in stacks and stands in log)
    assert json.loads((run / "record.json").read_text())["status"] == "hung"
    assert processes(folder) == []


def beats(folder: Path) -> bool:
    """Touch the run's heartbeat, and return whether the fault is still to come."""
    for record in folder.glob("runs/*/*/record.json"):
        (record.parent / "heartbeat").touch()
    return (folder / "fault").exists()


# ---- A server and its trainers

SPLIT = """
topology=split hardware.vllm=true topology.server_max_length=256 model.num_layers=2
method.args.save_steps=2 hardware.gpus_per_node=3 topology.num_gpus=3
""".split()
# Each kill takes a restart.
STREAM = """
topology.overlap=stream topology.max_staleness=4 runtime.max_restarts=3 method.args.max_steps=6
method.args.max_completion_length=32
""".split()
# A trainer retries a lost server for a minute; nothing here takes longer than this to save.
STREAM.append("runtime.stop_timeout_s=5")
TWO_SERVERS = [
    "topology.overlap=true",
    "topology.servers=2",
    "method.args.max_steps=3",
    "method.args.max_completion_length=16",
]
ARRIVE = "weights reach the server: log-probabilities changed by"


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        lacking("no vLLM (make vllm)")


def test_a_stream_ends_whole_after_kills_in_its_first_a_middle_and_its_last_step(vllm, tmp_path):
    """Kill a rank, the server within a weight transfer, and a rank again.

    Two ranks train, two generations behind the server; all restart together.
    """
    folder = prepared(tmp_path, plugin=True)
    # Three transfers are the check's, then comes one a step.
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
    assert f"resuming from {run / 'checkpoints/checkpoint-2'}\n" in killed_last
    assert f"resuming from {run / 'checkpoints/checkpoint-4'}\n" in last
    record = json.loads((run / "record.json").read_text())
    assert (record["status"], record["restarts"]) == ("done", 3)

    rows = json_files.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    oldest = {row["step"]: row["staleness/max"] for row in rows}
    assert max(oldest.values()) <= 4
    # Right after a start the server has the trainers' own weights.
    assert oldest[1] == oldest[3] == oldest[5] == 0
    difference = {row["step"]: row["sampling/sampling_logp_difference/mean"] for row in rows}
    assert difference[1] < ROUNDING < max(difference.values()) < 0.05, difference
    assert max(abs(row["sampling/importance_sampling_ratio/mean"] - 1) for row in rows) < 0.5
    seconds = ("wait_s", "sync_s", "reward_s", "train_s")
    assert min(row[name] for row in rows for name in ("reward_std", "grad_norm", *seconds)) > 0
    # Steps that a kill undid are trained on anew, so the last time counts.
    trained = dict(json.loads(line) for line in (folder / "trained").read_text().splitlines())
    assert sorted(trained) == list(range(1, 7))
    assert len({json.dumps(prompts) for prompts in trained.values()}) == 6


def test_two_servers_and_a_rank_that_overlap_end_with_that_rank(vllm, folder):
    """Have the rank die in the last step.

    At first both have the same weights; then the trainer's are one step ahead.
    """
    (folder / "fault").write_text("first 3")
    done = command(*SMALL, *SPLIT, *TWO_SERVERS, cwd=folder, timeout=ENDS_WITHIN_S)
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert "weights reach all 2 replicas of the server: log-probabilities changed by" in output
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
