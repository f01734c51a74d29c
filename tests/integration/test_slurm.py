"""Test runtime=slurm with a controller and three nodes on this machine.

Jobs train on the CPU with gloo, with one rank per node.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.core import json_files
from launch.plan import sealed
from launch.reproduce import compare_metrics
from tests.conftest import command
from tests.integration.conftest import PATIENCE_S, skip_without, wait_until

pytestmark = pytest.mark.integration
NODES = ("n1", "n2", "n3")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job starts after this time. The default is 120 s.
AuthInfo=socket={folder}/munge.sock,cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES MaxTime=60
"""
STEPS = 40  # enough for events in the middle of a run
SMALL = f"""
hardware=cpu topology=ddp model.num_layers=1 data.num_train={8 * STEPS} data.num_heldout=8
method.args.max_steps={STEPS} method.args.logging_steps=1 method.args.save_steps=100
method.args.per_device_train_batch_size=4 tracking=none
""".split()
# The same number of threads has the same rounding on both sides.
SMALL.append("user_env.OMP_NUM_THREADS=1")
TWO_NODES = ["runtime=slurm", "runtime.slurm.nodes=2", "runtime.slurm.interface=lo"]


class Cluster:
    """Run Slurm's daemons, and query jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self.daemons[name] = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def stop(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait(timeout=60)

    def kill_second_node(self, job: str) -> None:
        """Kill the daemon of n2, and the job's step there with its tasks."""
        killed = [psutil.Process(self.daemons["n2"].pid)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == [f"slurmstepd: [{job}.0]"]:
                    killed += [process, *process.children(recursive=True)]
        assert len(killed) > 2
        for process in killed:
            process.kill()

    @staticmethod
    def set_state(node: str, state: str) -> None:
        argv = ["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"]
        subprocess.run(argv, check=True)

    def log(self) -> str:
        return "\n".join(
            f"{file.name}: {file.read_text()[-2000:]}" for file in self.folder.glob("*.log")
        )

    @staticmethod
    def job(number: str) -> dict[str, str]:
        """Return the fields of a job. Values end at their first blank."""
        argv = ["scontrol", "show", "job", "--oneliner", number]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout))

    def wait_for_restart(self, job: str) -> None:
        wait_until(lambda: self.job(job)["Restarts"] == "1")

    def wait_until_idle(self) -> None:
        """Wait until all nodes have registered and none has a job."""
        wait_until(lambda: "idle n[1-3]" in sinfo())

    def ended(self, job: str) -> dict[str, str]:
        """Wait until the job has ended, and return its fields."""
        wait_until(lambda: self.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
        return self.job(job)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    absent = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "srun", "munged")
        if shutil.which(name) is None
    ]
    if absent:
        return skip_without(
            f"no {', '.join(absent)} (Debian: apt-get install slurmctld slurmd slurm-client munge)"
        )
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        CONFIG.format(folder=folder, host=host, user=getpass.getuser(), ports=free_ports(4))
    )
    (folder / "state").mkdir()
    (folder / "gpu").touch()  # Slurm counts this file as a device
    (folder / "gres.conf").write_text(f"NodeName=n[1-3] Name=gpu File={folder}/gpu\n")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = [f"--{name}={folder}/munged.{name}" for name in ("log-file", "pid-file", "seed-file")]
    daemons = Cluster(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        # --force, because others may have write access to a parent folder.
        daemons.start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.sock",
            f"--key-file={key}",
            *files,
        )
        wait_until((folder / "munge.sock").exists)
        daemons.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            daemons.start(node, "slurmd", "-D", "-N", node)
        daemons.wait_until_idle()
        yield daemons
    finally:
        daemons.stop()
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)
    return None


def sinfo() -> str:
    return subprocess.run(
        ["sinfo", "--noheader", "--states=idle", "--format=%T %N"], capture_output=True, text=True
    ).stdout


def submit(root: Path, *overrides: str) -> tuple[str, Path]:
    """Return (job, run directory)."""
    done = command(*TWO_NODES, *SMALL, *overrides, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.search(r"submitted job (\d+)", done.stdout).group(1)
    return job, newest(root)


def newest(root: Path) -> Path:
    return max(
        (f.parent for f in root.glob("runs/*/[0-9]*/job.sh")), key=lambda p: p.stat().st_mtime
    )


def wait_for_step(run_dir: Path, step: int) -> None:
    wait_until(
        lambda: any(
            row["step"] >= step for row in json_files.read_metrics(run_dir / "metrics.jsonl")
        )
    )


def slurm_log(run_dir: Path) -> str:
    return (run_dir / "logs/slurm.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the metrics of the same training without Slurm, on two ranks of this machine."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = command(*SMALL, "hardware.gpus_per_node=2", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = root.glob("runs/*/[0-9]*/metrics.jsonl")
    return json_files.read_metrics(metrics)


def test_two_nodes_compute_like_two_ranks_of_one_machine(cluster, undisturbed, tmp_path):
    """Use a directory whose name has characters that are special in shells and in sbatch."""
    root = tmp_path / "it's 100%j; #new $HOME"
    root.mkdir()
    done = command(
        *TWO_NODES,
        *SMALL,
        "runtime.slurm.wait=true",
        "runtime.slurm.options=['--comment=a b']",
        cwd=root,
    )
    assert done.returncode == 0, done.stdout + done.stderr + cluster.log()
    run_dir = newest(root)
    rows = json_files.read_metrics(run_dir / "metrics.jsonl")
    assert len(rows) == STEPS
    assert compare_metrics(undisturbed, rows) == []
    record = json_files.read_json(run_dir / "record.json")
    assert (record["status"], sealed.problems(record)) == ("done", [])
    assert {file.name for file in (run_dir / "nodes").iterdir()} == {"n1", "n2"}
    assert "trainers-1 is on n2" in (run_dir / "logs/trainers-1.log").read_text()
    assert f"step {STEPS}/{STEPS}" in (run_dir / "logs/rank0.log").read_text()
    assert (run_dir / "logs/rank1.log").exists(), "of the other node"
    assert f"step {STEPS}/{STEPS}" in done.stdout  # wait=true prints the log
    job = json_files.read_json(run_dir / "slurm.json")["job"]
    assert cluster.job(job)["Comment"] == "a"  # of `a b`


def test_early_signal_saves_requeues_and_resumes(cluster, undisturbed, tmp_path):
    job, run_dir = submit(tmp_path)
    wait_for_step(run_dir, 2)
    # The signal of `--signal=B:TERM@` before the time limit.
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    cluster.wait_for_restart(job)
    assert "requeueing job" in slurm_log(run_dir)
    end = cluster.ended(job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), slurm_log(run_dir)
    assert "resuming from" in (run_dir / "logs/rank0.log").read_text()
    assert compare_metrics(undisturbed, json_files.read_metrics(run_dir / "metrics.jsonl")) == []
    assert json_files.read_json(run_dir / "record.json")["status"] == "done"


def test_job_of_a_dead_node_is_requeued_and_resumes(cluster, tmp_path):
    """Kill a node like a power failure. The rank of the other node fails within seconds."""
    longer = ["method.args.max_steps=300", "data.num_train=2400", "method.args.save_steps=20"]
    job, run_dir = submit(tmp_path, *longer)
    wait_for_step(run_dir, 25)
    cluster.kill_second_node(job)
    try:
        wait_until(lambda: cluster.job(job)["JobState"] != "RUNNING")
        assert "dead nodes: n2." in slurm_log(run_dir)
        assert json_files.read_json(run_dir / "record.json")["exit_code"] == 4
        # Slurm does the same SlurmdTimeout (300 s) after the node died. The job starts again at
        # once, and nodes reject a start in the second in which they ended the first.
        ended = int(time.time())
        wait_until(lambda: int(time.time()) > ended)
        cluster.set_state("n2", "DOWN")
        cluster.wait_for_restart(job)
        end = cluster.ended(job)
    finally:
        cluster.start("n2", "slurmd", "-D", "-N", "n2")
        cluster.set_state("n2", "RESUME")
    cluster.wait_until_idle()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), (end, slurm_log(run_dir))
    assert "trainers-1 is on n3" in (run_dir / "logs/trainers-1.log").read_text()
    assert "resuming from" in (run_dir / "logs/rank0.log").read_text()
    rows = json_files.read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 301))
    assert json_files.read_json(run_dir / "record.json")["status"] == "done"


def test_report_missing_node(cluster, tmp_path):
    daemon = cluster.daemons["n2"]
    # The controller considers the node healthy, but no process can start there.
    daemon.send_signal(signal.SIGSTOP)
    try:
        overrides = ["runtime.slurm.rendezvous_timeout_s=5", "runtime.slurm.requeue=false"]
        overrides += ["runtime.slurm.options=['--nodelist=n1,n2']"]  # not the third node
        job, run_dir = submit(tmp_path, *overrides)
        record = run_dir / "record.json"
        wait_until(lambda: (json_files.read_json(record) or {}).get("exit_code") is not None)
        wait_until(lambda: "missing nodes" in slurm_log(run_dir))
    finally:
        daemon.send_signal(signal.SIGCONT)
    assert "missing nodes: n2." in slurm_log(run_dir)
    end = cluster.ended(job)
    assert (end["JobState"], end["ExitCode"]) == ("FAILED", "4:0")


def test_request_gpus_by_gres(cluster, tmp_path):
    arguments = """
        runtime=slurm hardware=h200 hardware.gpus_per_node=1 model=qwen3_0_6b model.init=random
        tracking=none
    """.split()
    done = command(*arguments, "runtime.slurm.wait=true", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "n1: hardware=h200: 1 nvidia GPU(s) needed, 0 found here" in done.stdout
    run_dir = newest(tmp_path)
    end = cluster.ended(json_files.read_json(run_dir / "slurm.json")["job"])
    assert (end["JobState"], end["ExitCode"], end["TresPerNode"]) == ("FAILED", "3:0", "gres:gpu:1")
    assert json_files.read_json(run_dir / "record.json")["status"] == "failed"


def test_keys_override_shell_variables(cluster, tmp_path, monkeypatch):
    variables = "TIMELIMIT=7 PARTITION=nope NO_REQUEUE=1 JOB_NAME=fromenv GRES=gpu:1 WAIT=1"
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"SBATCH_{name}", value)
    keys = ["runtime.slurm.time=30", "runtime.slurm.partition=main"]
    number, _ = submit(tmp_path, *keys, "runtime.slurm.options=['--hold']")
    job = cluster.job(number)
    subprocess.run(["scancel", number], check=True)
    expected = {
        "TimeLimit": "00:30:00",
        "Partition": "main",
        "Requeue": "1",
        "JobName": "sft-tiny-cpu",
    }
    assert {name: job[name] for name in expected} == expected
    assert "TresPerNode" not in job  # a job on CPUs requests no GPU
    cluster.ended(number)


def test_sweep_trials_are_jobs_and_run_once(cluster, tmp_path):
    """Check that other trials continue after a rule has rejected one."""
    overrides = [o for o in SMALL if not o.startswith(("topology=", "method.args.max_steps="))]
    grid = ["-m", *overrides, "method.args.max_steps=2", "effective_batch=4,5,8"]
    grid += ["runtime=slurm", "runtime.slurm.partition=main", "sweep.parallel=3"]
    done = command(*grid, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stdout + done.stderr + cluster.log()
    records = {
        file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/sft*/[0-9]*/record.json")
    }
    assert [json_files.read_json(file)["status"] for file in records] == ["done", "done"]
    (table,) = tmp_path.glob("runs/sweeps/*/sweep.json")
    trials = json_files.read_json(table)["trials"]
    assert [(trial["status"], trial["exit_code"]) for trial in trials] == [
        ("done", 0),
        ("failed", 2),
        ("done", 0),
    ]
    again = command(*grid, cwd=tmp_path)
    assert again.returncode == 2
    assert "2 of them finished" in again.stdout
    assert {file: file.stat().st_mtime_ns for file in records} == records


SPLIT = """
runtime=slurm runtime.slurm.nodes=3 runtime.slurm.interface=lo hardware=cpu hardware.vllm=true
method=grpo topology=split topology.num_gpus=1 topology.server_max_length=256 model.num_layers=2
topology.strategy=zero3 topology.overlap=stream
precision=fp32 data.num_train=64 tracking=none runtime.slurm.wait=true
method.args.num_generations=4 method.args.per_device_train_batch_size=4 method.args.max_steps=3
method.args.max_completion_length=8
""".split()


def test_server_on_a_node_of_its_own(cluster, tmp_path):
    """Two nodes train with ZeRO-3 and send their weights to the server of the third by TCP."""
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    done = command(*SPLIT, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.log()
    run_dir = newest(tmp_path)
    assert "server is on n3" in (run_dir / "logs/server.log").read_text()
    assert "weights reach the server: " in done.stdout
    rows = json_files.read_metrics(run_dir / "metrics.jsonl")
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    assert len(differences) == 3
    assert max(differences) < 1e-4, "the server has the weights of the step"
