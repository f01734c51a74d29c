"""Test runtime=slurm without Slurm: scripts, submission, and jobs on their nodes.

tests/integration/test_slurm.py has a real one.

sbatch, squeue and scontrol are small programs on the PATH here, which answer as Slurm 22.05 does
and write down how they were called. `UPDATE_GOLDEN=1 pytest <this file>` writes the golden scripts
anew; read the diff.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from launch.config.identity import composition_hash
from launch.core import json_files
from launch.core.errors import HostError
from launch.estimate import batch_counts
from launch.execution import orphans, slurm, slurm_job
from launch.execution.execute import check_host
from launch.execution.slurm_process import step
from launch.machine import placement
from launch.plan import rundir, sealed
from launch.plan.planning import prepare
from launch.plan.process_groups import SERVER
from launch.plan.resuming import recorded_config
from launch.rules.check import refusals
from tests.conftest import composed, host_with
from tests.helpers.slurm_examples import JOB, TWO, planned
from tests.launch.conftest import COMMIT

GOLDEN = Path(__file__).parents[3] / "tests/golden/slurm"
SCRIPTS = {
    "cpu": ["hardware=cpu", "runtime=slurm"],
    "one_node": (
        "hardware=mi300x model=qwen3_4b runtime=slurm topology.num_gpus=4 "
        "runtime.slurm.container=docker container=rocm"
    ).split(),
    "two_nodes": [
        *TWO,
        *"runtime.slurm.partition=gpu runtime.slurm.qos=high runtime.slurm.time=1-12".split(),
        'runtime.slurm.account="it\'s mine"',
        "runtime.slurm.gres='gpu:mi300x'",
        "runtime.slurm.requeue=false",
        "runtime.slurm.early_signal_s=600",
        "runtime.slurm.python=/opt/my env/bin/python",
        "runtime.slurm.options=['--exclusive','--comment=a b; rm -rf $HOME #']",
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, monkeypatch):
    monkeypatch.setattr(slurm, "JOB_PROGRAM", Path("/repository/launch/execution/slurm_job.py"))
    monkeypatch.setattr(sys, "executable", "/repository/.venv/bin/python")
    text = slurm.script(planned(*SCRIPTS[name]), host_with(8))
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_options_and_command_survive_the_shells_quoting():
    text = slurm.script(planned(*SCRIPTS["two_nodes"]), host_with(8))
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = [shlex.split(line.removeprefix("#SBATCH "), comments=False) for line in lines]
    for option in (
        "--comment=a b; rm -rf $HOME #",
        "--account=it's mine",
        "--output=/shared/my runs/100%%/1/logs/slurm.log",  # sbatch replaces % fields
    ):
        assert [option] in options
    command = ["exec", "/opt/my env/bin/python", str(slurm.JOB_PROGRAM), "/shared/my runs/100%/1"]
    assert shlex.split(text.splitlines()[-1]) == command


def test_a_script_contains_no_secret():
    plan = planned(*SCRIPTS["one_node"], HF_TOKEN="hf_verysecret")
    assert "hf_verysecret" not in slurm.script(plan, host_with(8, HF_TOKEN="hf_verysecret"))


def test_mode_plan_shows_the_script_and_submits_nothing(launch, tools, tmp_path):
    done = launch("runtime=slurm", "hardware=cpu", "mode=plan", "format=json")
    assert done.code == 0, done.err
    assert "#SBATCH --nodes=1" in json.loads(done.out)["script"]
    assert tools.calls() == []
    assert not (tmp_path / "runs").exists()


# ---- Several nodes in plan and arithmetic


def test_the_batch_counts_ranks_of_all_nodes():
    config = composed(*TWO, "topology=fsdp")
    ranks = (
        placement.num_gpus(config),
        placement.num_trainers(config),
        batch_counts.batch(config).ranks,
    )
    assert ranks == (8, 16, 16)
    one, two = planned(*TWO[:2], "topology=fsdp", "runtime=local"), planned(*TWO, "topology=fsdp")
    assert two.memory[0].parts_gb["optimizer"] == one.memory[0].parts_gb["optimizer"] / 2
    # Not exactly twice, because each rank updates a smaller share of the weights.
    doubled = pytest.approx(2 * one.speed.tokens_per_second, rel=0.02)
    assert two.speed.tokens_per_second == doubled
    rows = "method.args.per_device_train_batch_size=2"
    config, _ = prepare(composed(*TWO, "topology=ddp", "effective_batch=128", rows))
    assert config.method.args["gradient_accumulation_steps"] == 4
    assert composed(*TWO, "method=grpo").topology.name == "ddp"  # a split stays on one node


def test_each_node_has_a_process_and_the_first_node_starts_last():
    plan = planned(*TWO, "topology=ddp", MASTER_ADDR="10.0.0.1", MASTER_PORT="29400")
    groups = [(p.name, p.node, p.num_ranks, len(p.gpus)) for p in plan.processes]
    assert groups == [("trainers-1", 1, 8, 8), ("trainers", 0, 8, 8)]
    for process in plan.processes:
        words = shlex.join(process.argv)
        assert f"--nnodes 2 --node-rank {process.node} --rdzv-backend static" in words
        assert "--master-addr 10.0.0.1 --master-port 29400" in words
        assert "--standalone" not in words
    # Slurm has not chosen nodes yet.
    assert "$MASTER_ADDR" in planned(*TWO, "topology=ddp").processes[0].argv


def test_a_server_has_the_last_node():
    overrides = "method=grpo topology=split topology.servers=8 runtime.slurm.nodes=3".split()
    shell = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", SERVER: "10.0.0.3:8000"}
    plan = planned(*TWO, *overrides, **shell)
    groups = [(p.name, p.node, p.gpus, p.port) for p in plan.processes]
    gpus = list(range(8))
    assert groups == [
        ("server", 2, gpus, 8000),
        ("trainers-1", 1, gpus, None),
        ("trainers", 0, gpus, None),
    ]
    server, other, first = plan.processes
    assert "--host 10.0.0.3 --port 8000" in shlex.join(server.argv)
    assert "--nnodes 2 --node-rank 1" in shlex.join(other.argv)
    assert plan.trainer_args["vllm_server_base_url"] == "http://10.0.0.3:8000"
    assert first.env["VLLM_HOST_IP"] == "10.0.0.1"
    assert placement.num_trainers(plan.config) == 16


def test_network_settings_reach_every_rank():
    network = ("runtime.slurm.hca='=mlx5_0:1'", "runtime.slurm.gid_index=3")
    variables = {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_IB_GID_INDEX": "3",
    }
    env = planned(*TWO, "topology=ddp", *network).processes[0].env
    assert {name: env.get(name) for name in variables} == variables
    env = planned(*TWO[:2], "topology=ddp", "runtime=local").processes[0].env
    assert not set(variables) & set(env)


def test_a_step_uses_its_complete_node_without_this_launchers_mark():
    plan = planned(*TWO, "topology=ddp")
    argv = step(plan.run_dir, plan.processes[0]).argv
    assert argv[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--relative=1", "--cpu-bind=none"} <= set(argv)
    assert argv[-4:] == [sys.executable, str(slurm.JOB_PROGRAM), str(plan.run_dir), "trainers-1"]
    assert argv[argv.index("env") + 1 :][:4] == ["-u", orphans.LAUNCHER, "-u", orphans.PROCESS]


def test_a_run_on_several_nodes_starts_only_in_a_job():
    with pytest.raises(HostError, match="runtime=slurm"):
        check_host(planned("hardware=cpu", "runtime=slurm", "runtime.slurm.nodes=2"), host_with(0))


@pytest.mark.parametrize(("override", "rules"), [
    ("options=['-p gpu']", ["slurm_options"]),
    ("options=['--array=0-3']", ["slurm_options"]),
    ("options=['--part=x']", ["slurm_options"]),  # getopt accepts abbreviations
    ("options=['--time-min=5','--gres-flags=enforce-binding','--mem=0']", []),
    ("gres='gpu:1g.10gb'", []),
])  # fmt: skip
def test_an_option_that_the_composition_decides_is_rejected(override, rules):
    config = composed("hardware=cpu", "runtime=slurm", f"runtime.slurm.{override}")
    assert [rule.name for rule in refusals(config)] == rules


# ---- Submission


@pytest.fixture
def watching(monkeypatch):
    monkeypatch.setattr(slurm, "QUERY_EVERY_S", 0.0)
    return "runtime.slurm.wait=true"


def ends(exit_code: int | None, then: str = "exit 0") -> str:
    """Let squeue print RUNNING once; then the job writes its record and leaves the queue."""
    record = json.dumps({"status": "x", "exit_code": exit_code})
    last = f"echo step 1/1 > logs/slurm.log; echo '{record}' > record.json; {then}"
    return f"cd runs/*/[0-9]*; test -e seen && {{ {last}; }}; touch seen; echo RUNNING"


def test_submit_writes_the_inputs_of_the_job_and_returns(launch, tools, tmp_path):
    done = launch(*JOB, "format=json")
    assert done.code == 0, done.err
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")
    assert tools.calls() == [f"sbatch --parsable {run_dir}/job.sh"]
    answer = json.loads(done.out)
    assert (answer["job"], answer["script"]) == ("12", str(run_dir / "job.sh"))
    assert json_files.read_json(run_dir / "slurm.json") == {"job": "12"}
    record = json_files.read_json(run_dir / "record.json")
    assert (record["status"], record["overrides"]) == ("submitted", [*JOB, "format=json"])
    assert sealed.problems(record) == []
    # The job runs the submitted composition, and resumes it.
    assert composition_hash(slurm_job.composition(run_dir)) == record["composition_hash"]


GRPO = "runtime=slurm hardware=mi300x model=qwen3_4b method=grpo topology=split".split()
PUBLIC = "runtime=slurm hardware=mi300x model=llama3_1_70b data=numina_math".split()


@pytest.mark.parametrize(("words", "group", "repository"), [
    (GRPO, "model", ("Qwen/Qwen3-4B",)),
    (PUBLIC, "data", ("AI-MO/NuminaMath-CoT", "datasets")),
])  # fmt: skip
def test_a_run_records_the_newest_commit_and_keeps_it(
    launch, tools, tmp_path, hub, words, group, repository
):
    tools.add("squeue", "exit 0")  # the job has left the queue
    hub(*repository)
    for commit in (COMMIT, "d" * 40):
        if commit != COMMIT:
            hub(*repository, commit=commit)
        done = launch(*words, "tracking=none")
        assert done.code == 0, done.err
        [run_dir] = (tmp_path / "runs").glob("*/[0-9]*")  # the second command resumes the first
        record = json_files.read_json(run_dir / "record.json")
        assert record[group]["revision"] == COMMIT
        for config in (slurm_job.composition(run_dir), recorded_config(record["composition"])):
            assert getattr(config, group).revision == COMMIT
        assert all(COMMIT in argv for name, argv in record["argv"].items() if "server" in name)
    assert launch(*words, f"{group}.revision={'d' * 40}", "tracking=none").code == 0
    assert len([*(tmp_path / "runs").glob("*/[0-9]*")]) == 2


@pytest.mark.parametrize("file", [".gitattributes", "rows.jsonl", "refs"])
def test_a_run_records_the_commits_of_a_mix_without_readme(launch, tools, tmp_path, hub, file):
    tools.add("squeue", "exit 0")
    hub("me/rows", "datasets")
    cache = tmp_path / "datasets--me--rows"
    readme = cache / "snapshots" / COMMIT / "README.md"
    readme.rename(readme.with_name(file))
    if file == "refs":  # downloaded by its commit
        shutil.rmtree(cache / "refs")
    else:
        (cache / "snapshots" / ("d" * 40)).mkdir()  # an older one
    (tmp_path / "rows").mkdir()
    sources = f"[{{hub_id: me/rows, weight: 0.5}}, {{hub_id: {tmp_path}/rows, weight: 0.5}}]"
    for _ in range(2):  # the second command resumes the first
        done = launch(*JOB, "data=mix", f"data.sources={sources}", "tracking=none")
        assert done.code == 0, done.err
        [run_dir] = (tmp_path / "runs").glob("*/[0-9]*")
        commits = [source.revision for source in slurm_job.composition(run_dir).data.sources]
        assert commits == [COMMIT, None]


@pytest.mark.parametrize(("words", "group"), [(GRPO, "model"), (PUBLIC, "data")])
def test_a_plan_needs_no_commit_and_a_run_names_what_it_lacks(
    launch, tools, tmp_path, hub, words, group
):
    plan = launch(*words, "mode=plan")
    line = next(line for line in plan.out.splitlines() if line.startswith(f"  {group}"))
    assert "newest commit" in line
    done = launch(*words, "tracking=none")
    assert (done.code, tools.calls()) == (2, [])
    assert f"Or use: {group}.revision=" in done.err
    assert not [*(tmp_path / "runs").glob("*/[0-9]*")]


SHELL = {
    "SBATCH_TIMELIMIT": "7",
    "SBATCH_SIGNAL": "B:USR2@10",
    "SBATCH_CONSTRAINT": "ib",
    **dict.fromkeys(("HIP_VISIBLE_DEVICES", *slurm.MASKS), "5"),
}
DEFAULTS = {"SBATCH_QOS": "usual", "MINE": "kept"}


def test_the_shell_overrides_no_key_and_passes_no_mask(launch, tools, monkeypatch, tmp_path):
    """A site's default applies if its key is null."""
    for name, value in {**SHELL, **DEFAULTS}.items():
        monkeypatch.setenv(name, value)
    tools.add("sbatch", f"env > {tmp_path}/seen; echo 12")
    options = ("time=30", "partition=main", "options=['--mem=0','--exclusive']")
    done = launch(*JOB, *(f"runtime.slurm.{option}" for option in options))
    assert done.code == 0, done.err
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert {name: seen[name] for name in seen if name in {**SHELL, **DEFAULTS}} == DEFAULTS
    assert "SBATCH_TIMELIMIT" in done.out


@pytest.mark.parametrize("refusal", ["sbatch: error: Invalid account", "No such file"])
def test_a_run_that_sbatch_rejects_has_failed(launch, tools, monkeypatch, tmp_path, refusal):
    tools.add("sbatch", f"echo '{refusal}' >&2; exit 1")
    if refusal == "No such file":  # without sbatch
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    done = launch(*JOB)
    assert done.code == 3
    assert refusal in done.err
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")
    assert json_files.read_json(run_dir / "record.json")["status"] == "failed"


@pytest.mark.parametrize(("overrides", "code"), [
    (["hardware=mi50", "model=qwen3_14b", "topology=single", "tracking=none"], 3),
    (["experiment=quickstart"], 2),  # a pipeline is several runs
])  # fmt: skip
def test_an_invalid_run_is_not_submitted(launch, tools, overrides, code):
    assert launch("runtime=slurm", *overrides).code == code
    assert tools.calls() == []


def test_a_run_has_no_second_job_until_the_first_has_ended(launch, tools, tmp_path):
    assert launch(*JOB).code == 0
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")
    tools.add("squeue", "echo RUNNING")
    with rundir.locked(run_dir):  # as the job's launcher does
        second = launch(*JOB)
    assert second.code == 2
    assert "job 12 of this run is RUNNING" in second.err
    tools.add("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert launch(*JOB).code == 0
    assert list((tmp_path / "runs/sft-tiny-cpu").glob("[0-9]*")) == [run_dir]


def test_wait_follows_the_existing_job_of_a_run(launch, tools, watching):
    """A resumed sweep follows the jobs of its trials."""
    assert launch(*JOB).code == 0
    tools.add("squeue", ends(0))
    assert launch(*JOB, watching).code == 0
    assert [call.split()[0] for call in tools.calls()] == ["sbatch", "squeue", "squeue"]


def test_a_signal_while_waiting_leaves_the_job_running(launch, tools, watching):
    tools.add("squeue", "kill -TERM $PPID; echo RUNNING")
    done = launch(*JOB, watching)
    assert (done.code, "scancel 12" in done.out) == (75, True)


@pytest.mark.parametrize(("exit_code", "code"), [(75, 75), (None, 4)])
def test_wait_returns_the_jobs_exit_code(launch, tools, watching, exit_code, code):
    tools.add("squeue", ends(exit_code))
    done = launch(*JOB, watching)
    assert done.code == code, done.err
    assert "step 1/1" in done.out


def test_a_busy_controller_is_queried_for_an_hour(launch, tools, monkeypatch, watching):
    busy = "{ echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1; }"
    tools.add(
        "squeue",
        f"cd runs/*/[0-9]*; test -e again || {{ touch again; {busy}; }}; cd ../../..\n{ends(0)}",
    )
    done = launch(*JOB, watching)
    assert done.code == 0, done.err
    assert done.out.count("Socket timed out") == 1
    tools.add("squeue", busy)
    monkeypatch.setattr(slurm, "PATIENCE_S", 0.0)
    done = launch(*JOB, watching, "seed=1")
    assert done.code == 3
    assert "Socket timed out" in done.err


def test_ctrl_c_does_not_end_the_job(launch, tools):
    tools.add("squeue", f"kill -INT {os.getpid()}; echo RUNNING")
    assert launch(*JOB, "runtime.slurm.wait=true").code == 75
    assert not any(call.startswith("scancel") for call in tools.calls())
