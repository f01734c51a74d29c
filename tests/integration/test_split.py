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
import subprocess
import sys
from pathlib import Path

import pytest

from launch.core import json_files
from launch.execution import orphans, serving
from tests.conftest import ROOT, command
from tests.helpers.supervised import eventually
from tests.integration.conftest import lacking

pytestmark = pytest.mark.integration

SMALL = [
    *[
        "hardware=cpu",
        "method=grpo",
        "model=tiny",
        "precision=fp32",
        "data.num_train=64",
        "tracking=none",
    ],
    *[
        "+method.rewards={faults.reward: 1.0}",
        "method.reward_confined=false",
        "method.args.num_generations=4",
        "method.args.per_device_train_batch_size=4",
    ],
    # Weights that move enough in one step for the server's log-probabilities to show it.
    *[
        "method.args.learning_rate=3e-5",
        "method.args.lr_scheduler_type=constant",
        "method.args.warmup_steps=0",
    ],
]
TWO_RANKS = [
    *["topology=ddp", "hardware.gpus_per_node=2", "topology.num_gpus=2", "model.num_layers=1"],
    *["method.args.max_completion_length=6", "method.args.max_steps=8", "method.args.save_steps=2"],
]
# What differs between two runs of the same computation.
TIMED = {
    "time_s",
    "step_s",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "memory_peak_gb",
}
TIMED |= {"generation_s", "wait_s", "sync_s", "reward_s", "train_s"}
KILLED = "failed: killed by signal 9 (SIGKILL)\nLast lines of"
MEANS = (
    "This usually means: the host's memory is full "
    "(`dmesg | grep -i oom` shows what the kernel killed), or somebody killed the process."
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


def left(folder: Path) -> list[int]:
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


def test_a_run_that_hangs_and_is_killed_again_and_again_computes_what_an_undisturbed_one_does(
    folder, undisturbed
):
    """Give the same command each time.

    A rank hangs before there is a checkpoint, one dies in the middle and one in the last step.
    Between them the launcher is told to stop, and is killed.
    """
    hangs(folder)
    rank_0, rank_1 = (f"trainers, rank {rank} {KILLED}" for rank in (0, 1))
    told = "SIGTERM: waiting for trainers to save and end"
    # Fault, step it begins after, exit code, message.
    for fault, resumed, code, words in [
        ("first 4", 0, 4, [rank_0, MEANS]),
        ("stop 5", 2, 75, [told, "interrupted after step 5"]),
        ("lose 6", 5, -signal.SIGKILL, []),
        ("kill 8", 6, 4, [rank_1, MEANS]),
        ("", 6, 0, ["done: 8 steps"]),
    ]:
        (folder / "fault").write_text(fault)
        done = command(*SMALL, *TWO_RANKS, cwd=folder, timeout=ENDS_WITHIN_S)
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        assert all(word in said for word in words), said
        assert eventually(lambda: left(folder) == []), f"{fault}: processes are left"
        assert not fault or not (folder / "fault").exists(), f"{fault} did not happen"
        checkpoint = only_run(folder) / f"checkpoints/checkpoint-{resumed}"
        assert (f"resuming from {checkpoint}\n" in said) == (resumed > 0), said
    assert computed(only_run(folder)) == undisturbed
    assert undisturbed[0]["reward_std"] > 0
    assert [row["step"] for row in undisturbed] == list(range(1, 9))


def hangs(folder: Path) -> None:
    """Have a rank hang in the second step.

    The heart beats for the imports here, which are silent for as long as a busy machine needs. So
    the timeout need not allow for them.
    """
    (folder / "fault").write_text("hang 2")
    short = ["runtime.hang_timeout_s=10", "runtime.stop_timeout_s=2"]
    launcher = started(folder, *SMALL, *TWO_RANKS, *short)
    try:
        assert eventually(lambda: launcher.poll() is not None or not beats(folder), ENDS_WITHIN_S)
        code, said = launcher.wait(ENDS_WITHIN_S), (folder / "said").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert code == 5, said
    assert not (folder / "fault").exists()
    run = only_run(folder)
    assert "trainers hung: no step, no token and no load progress for 1" in said
    assert f"stacks of trainers are in {run / 'stacks'}" in said
    # If py-spy is not permitted, each rank writes its stacks into its log. Children of a rank have
    # files with its number too.
    for rank, stands in ((1, "hang_here"), (0, "gather")):
        stacks = "".join(file.read_text() for file in (run / "stacks").glob(f"rank{rank}-*.txt"))
        log = (run / f"logs/rank{rank}.log").read_text()
        assert stands in stacks or ("its stacks are in its log" in stacks and stands in log)
    assert json.loads((run / "record.json").read_text())["status"] == "hung"
    assert left(folder) == []


def beats(folder: Path) -> bool:
    """Touch the run's heartbeat, and return whether the fault is still to come."""
    for record in folder.glob("runs/*/*/record.json"):
        (record.parent / "heartbeat").touch()
    return (folder / "fault").exists()


def started(folder: Path, *arguments: str) -> subprocess.Popen:
    """Start a launcher in the background, whose output goes to the file `said`."""
    argv = [sys.executable, str(ROOT / "launch/run.py"), *arguments]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            argv, cwd=folder, stdout=said, stderr=said, env={**os.environ, "COLUMNS": "200"}
        )


# ---- A server and its trainers

SPLIT = [
    *[
        "topology=split",
        "hardware.vllm=true",
        "topology.server_max_length=256",
        "model.num_layers=2",
    ],
    *["method.args.save_steps=2", "method.args.max_completion_length=64"],
]
# A server that is killed takes its restart; the second time the run ends.
ONE_AND_ONE = [
    *[*SMALL, *SPLIT, "hardware.gpus_per_node=2", "topology.num_gpus=2"],
    *[
        "topology.overlap=stream",
        "topology.max_staleness=4",
        "runtime.max_restarts=1",
        "method.args.max_steps=8",
    ],
    # A trainer retries a lost server for a minute; nothing here takes longer than this to save.
    "runtime.stop_timeout_s=5",
]
RUNNING = re.compile(r"^vllm:num_requests_running(?:\{.*\})? ([1-9]\S*)", re.MULTILINE)
ARRIVE = "weights reach the server: log-probabilities moved by"


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        lacking("no vLLM (make vllm)")


@pytest.fixture(scope="module")
def killed_twice(vllm, tmp_path_factory) -> tuple[Path, int, str]:
    """Return the folder of a run whose server died twice, its exit code, and its output.

    It died in the middle of a transfer, then of a generation.
    """
    folder = prepared(tmp_path_factory.mktemp("split"), plugin=True)
    (folder / "fault").write_text("sync 6")  # three are the check's, then one a step
    launcher = started(folder, *ONE_AND_ONE)
    try:
        assert eventually(
            lambda: launcher.poll() is not None or generates(folder, after_step=4), ENDS_WITHIN_S
        )
        orphans.kill({orphans.PROCESS: f"{launcher.pid}/server"})
        return folder, launcher.wait(ENDS_WITHIN_S), (folder / "said").read_text()
    finally:
        launcher.kill()
        launcher.wait()


def generates(folder: Path, after_step: int) -> bool:
    """Return whether this step's checkpoint exists, and the server works on a request."""
    if not list(folder.glob(f"runs/*/*/checkpoints/checkpoint-{after_step}")):
        return False
    plan = json.loads((only_run(folder) / "plan.json").read_text())
    (argv,) = [process["argv"] for process in plan["processes"] if process["kind"] == "server"]
    try:
        return (
            RUNNING.search(serving.get(int(argv[argv.index("--port") + 1]), "/metrics")) is not None
        )
    except OSError:
        return False


@pytest.fixture(scope="module")
def finished(killed_twice) -> tuple[Path, int, str]:
    """Return the run that the same command has finished, and its output.

    Between them is the step after which it resumed.
    """
    folder, *_ = killed_twice
    newest = max(
        int(path.name.partition("-")[2])
        for path in folder.glob("runs/*/*/checkpoints/checkpoint-*")
    )
    done = command(*ONE_AND_ONE, cwd=folder, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder), newest, done.stdout + done.stderr


def test_a_server_that_dies_in_a_weight_transfer_is_started_anew_with_its_trainers(killed_twice):
    folder, _, said = killed_twice
    first, restart, second = said.partition("restart 1 of 1, from the newest whole checkpoint")
    assert restart, said
    assert "\nserver failed: Worker proc VllmWorker-0 died unexpectedly (exit code: " in first, (
        first
    )
    assert MEANS in first
    assert "trainers failed" not in first
    assert ARRIVE in second
    assert f"resuming from {only_run(folder) / 'checkpoints/checkpoint-2'}\n" in second


def test_a_server_that_dies_while_it_generates_ends_the_run(killed_twice):
    folder, code, said = killed_twice
    assert code == 4, said
    assert f"\nserver {KILLED}" in said
    assert MEANS in said
    assert "trainers failed" not in said
    record = json.loads((only_run(folder) / "record.json").read_text())
    assert (record["status"], record["restarts"]) == ("failed", 1)
    assert left(folder) == []


def test_the_same_command_finishes_what_its_server_did_not_survive(finished):
    run, newest, said = finished
    assert 4 <= newest < 8
    assert f"resuming from {run / 'checkpoints'}/checkpoint-{newest}\n" in said
    assert ARRIVE in said
    assert [row["step"] for row in computed(run)] == list(range(1, 9))
    assert json.loads((run / "record.json").read_text())["status"] == "done"
    assert left(run.parents[2]) == []


def test_a_streamed_run_trains_on_each_prompt_once_and_on_none_that_is_too_old(finished):
    """Keep two generations in flight beside the one that is trained on.

    Right after a start they have the trainer's own weights.
    """
    run, newest, _ = finished
    rows = json_files.read_metrics(run / "metrics.jsonl")
    oldest = {row["step"]: row["staleness/max"] for row in rows}
    assert max(oldest.values()) <= 4
    assert oldest[1] == oldest[newest + 1] == 0
    off = {row["step"]: row["sampling/sampling_logp_difference/mean"] for row in rows}
    assert off[1] < ROUNDING < max(off.values()) < 0.05, off
    assert max(abs(row["sampling/importance_sampling_ratio/mean"] - 1) for row in rows) < 0.5
    for row in rows:
        assert (
            min(
                row[name]
                for name in ("reward_std", "grad_norm", "wait_s", "sync_s", "reward_s", "train_s")
            )
            > 0
        )
    # Steps that a kill undid are trained on anew, so the last time counts.
    trained = dict(
        json.loads(line) for line in (run.parents[2] / "trained").read_text().splitlines()
    )
    assert sorted(trained) == list(range(1, 9))
    assert len({json.dumps(prompts[0]) for prompts in trained.values()}) == 8


def test_one_server_and_seven_ranks(vllm, folder):
    one_and_seven = [
        "hardware.gpus_per_node=8",
        "topology.num_gpus=8",
        "method.args.max_steps=2",
        "method.args.max_completion_length=16",
    ]
    done = command(*SMALL, *SPLIT, *one_and_seven, cwd=folder, timeout=ENDS_WITHIN_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ARRIVE in said
    run = only_run(folder)
    assert len(list((run / "checkpoints/checkpoint-2").glob("rng_state_*.pth"))) == 7
    rows = json_files.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    # Synchronous, so the server has the ranks' weights, even after they have moved.
    for row in rows:
        assert row["sampling/sampling_logp_difference/mean"] < ROUNDING
        assert (
            min(
                row[name]
                for name in (
                    "reward_std",
                    "grad_norm",
                    "generation_s",
                    "wait_s",
                    "sync_s",
                    "reward_s",
                    "train_s",
                )
            )
            > 0
        )
    assert left(folder) == []


TWO_AND_ONE = [
    *["topology.servers=2", "hardware.gpus_per_node=3", "topology.num_gpus=3"],
    *["method.args.max_steps=4", "method.args.max_completion_length=16"],
]


def test_two_servers_and_a_rank_that_overlap_and_end_with_that_rank(vllm, folder):
    """Have the rank die in the last step.

    At first both have the same weights; then the trainer's are one step ahead.
    """
    (folder / "fault").write_text("first 4")
    done = command(
        *SMALL, *SPLIT, *TWO_AND_ONE, "topology.overlap=true", cwd=folder, timeout=ENDS_WITHIN_S
    )
    said = done.stdout + done.stderr
    assert done.returncode == 4, said
    assert "weights reach all 2 replicas of the server: log-probabilities moved by" in said
    assert "server failed" not in said
    assert f"trainers {KILLED}" in said
    assert MEANS in said
    run = only_run(folder)
    first, second, *_ = (
        row["sampling/sampling_logp_difference/mean"]
        for row in json_files.read_metrics(run / "metrics.jsonl")
    )
    assert first < ROUNDING < second < 0.05
    assert json.loads((run / "record.json").read_text())["status"] == "failed"
    assert left(folder) == []
