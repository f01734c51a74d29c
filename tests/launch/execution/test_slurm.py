"""runtime=slurm without a Slurm: scripts, submission, what a job does on its nodes.

tests/integration/test_slurm.py has a real one.

sbatch, squeue and scontrol are small programs on the PATH here, which answer as Slurm 22.05 does
and write down how they were called. `UPDATE_GOLDEN=1 pytest <this file>` writes the golden scripts
anew; read the diff.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from launch.config.identity import composition_hash
from launch.core import json_files
from launch.core.errors import HostError, UserError
from launch.estimate import batch
from launch.execution import orphans, slurm, slurm_job
from launch.execution.slurm_process import step
from launch.machine import placement
from launch.plan import rundir, sealed
from launch.plan.planning import prepare
from launch.rules.check import check, refusals
from launch.rules.slurm import seconds
from tests.conftest import composed, host_with
from tests.helpers.slurm_examples import JOB, TWO, planned

GOLDEN = Path(__file__).parents[3] / "tests/golden/slurm"
SCRIPTS = {
    "cpu": ["hardware=cpu", "runtime=slurm"],
    "one_node": [
        "hardware=mi300x",
        "model=qwen3_4b",
        "runtime=slurm",
        "topology.num_gpus=4",
        "runtime.slurm.inner=docker",
        "container=rocm",
    ],
    "two_nodes": [
        *TWO,
        "runtime.slurm.partition=gpu",
        'runtime.slurm.account="it\'s mine"',
        "runtime.slurm.qos=high",
        "runtime.slurm.time=1-12",
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


def test_every_word_of_a_script_comes_back_whole():
    text = slurm.script(planned(*SCRIPTS["two_nodes"]), host_with(8))
    options = [
        shlex.split(line.removeprefix("#SBATCH "), comments=False)
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {len(words) for words in options} == {1}
    assert ["--comment=a b; rm -rf $HOME #"] in options
    assert ["--account=it's mine"] in options
    assert [
        "--output=/shared/my runs/100%%/1/logs/slurm.log"
    ] in options  # one % is a field of sbatch's
    assert shlex.split(text.splitlines()[-1]) == [
        "exec",
        "/opt/my env/bin/python",
        str(slurm.JOB_PROGRAM),
        "/shared/my runs/100%/1",
    ]


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_what_no_line_can_hold_is_refused(name):
    with pytest.raises(UserError, match="no backslash and no line break"):
        slurm.script(planned(*SCRIPTS["cpu"], run_dir=Path("/runs") / name), host_with(8))


def test_a_secret_of_the_shell_is_in_no_script():
    plan = planned(*SCRIPTS["one_node"], HF_TOKEN="hf_verysecret")
    assert "hf_verysecret" not in slurm.script(plan, host_with(8, HF_TOKEN="hf_verysecret"))


def test_mode_plan_shows_the_script_and_submits_nothing(launch, tools, tmp_path):
    done = launch("runtime=slurm", "hardware=cpu", "mode=plan")
    assert done.code == 0, done.err
    assert "#SBATCH --nodes=1" in done.out
    as_json = launch("runtime=slurm", "hardware=cpu", "mode=plan", "format=json")
    assert json.loads(as_json.out)["script"].startswith("#!/usr/bin/env bash\n")
    assert tools.calls() == []
    assert not (tmp_path / "runs").exists()


# ---- Several nodes in plan and arithmetic


def test_ranks_of_all_nodes_count():
    config = composed(*TWO, "topology=fsdp")
    assert (
        placement.num_gpus(config),
        placement.num_trainers(config),
        batch.batch(config).ranks,
    ) == (8, 16, 16)
    one, two = planned(*TWO[:2], "topology=fsdp", "runtime=local"), planned(*TWO, "topology=fsdp")
    assert two.memory[0].parts_gb["optimizer"] == one.memory[0].parts_gb["optimizer"] / 2
    assert two.speed.tokens_per_second == pytest.approx(
        2 * one.speed.tokens_per_second, rel=0.02
    )  # a rank's share of the optimizer


def test_effective_batch_counts_all_nodes():
    config, _ = prepare(
        composed(
            *TWO, "topology=ddp", "effective_batch=128", "method.args.per_device_train_batch_size=2"
        )
    )
    assert config.method.args["gradient_accumulation_steps"] == 4


def test_a_process_for_each_node_the_first_one_last():
    plan = planned(*TWO, "topology=ddp", MASTER_ADDR="10.0.0.1", MASTER_PORT="29400")
    assert [(p.name, p.node, p.num_ranks, len(p.gpus)) for p in plan.processes] == [
        ("trainers-1", 1, 8, 8),
        ("trainers", 0, 8, 8),
    ]
    for process in plan.processes:
        words = shlex.join(process.argv)
        assert (
            f"--nnodes 2 --node-rank {process.node} --rdzv-backend static --master-addr "
            "10.0.0.1 --master-port 29400" in words
        )
        assert "--rdzv-conf timeout=600" in words
        assert "--standalone" not in words


def test_the_address_is_a_name_until_slurm_has_chosen_the_nodes():
    assert "$MASTER_ADDR" in planned(*TWO, "topology=ddp").processes[0].argv


def test_the_network_that_was_asked_for_reaches_every_rank():
    env = (
        planned(*TWO, "topology=ddp", "runtime.slurm.hca='=mlx5_0:1'", "runtime.slurm.gid_index=3")
        .processes[0]
        .env
    )
    wanted = {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert {name: env.get(name) for name in wanted} == wanted
    assert not set(wanted) & set(
        planned("hardware=mi300x", "model=qwen3_4b", "topology=ddp", "runtime=local")
        .processes[0]
        .env
    )


def test_auto_spreads_over_nodes():
    assert composed(*TWO, "method=grpo").topology.name == "ddp"  # a split stays on one node
    config = composed("hardware=cpu", "runtime=slurm", "runtime.slurm.nodes=2")
    assert config.topology.name == "ddp"
    assert placement.num_trainers(config) == 2


def test_a_step_takes_its_whole_node_and_no_mark_of_this_one():
    plan = planned(*TWO, "topology=ddp")
    argv = step(plan.run_dir, plan.processes[0])
    assert argv[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--relative=1", "--cpu-bind=none"} <= set(argv)
    assert argv[-4:] == [sys.executable, str(slurm.JOB_PROGRAM), str(plan.run_dir), "trainers-1"]
    assert argv[argv.index("env") + 1 :][:4] == ["-u", orphans.LAUNCHER, "-u", orphans.PROCESS]


def test_a_run_on_several_nodes_starts_in_a_job_only():
    from launch.execution.execute import check_host

    with pytest.raises(HostError, match="runtime=slurm"):
        check_host(planned("hardware=cpu", "runtime=slurm", "runtime.slurm.nodes=2"), host_with(0))


@pytest.mark.parametrize(
    ("time", "found"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14400),
        ("1-1:30", 91800),
        ("1-0:0:1", 86401),
        ("4h", None),
        ("1:2:3:4", None),
    ],
)
def test_times_as_sbatch_reads_them(time, found):
    assert seconds(time) == found


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("-p gpu", "is not a long option"),
        ("exclusive", "is not a long option"),
        ("--mem 0", "is not a long option"),
        ("--time=5", "is decided by runtime.slurm.time"),
        ("--array=0-3", "is decided by nothing"),
        ("--gpus-per-node=2", "is decided by topology.num_gpus"),
        ("--tasks-per-node=2", "is decided by the launcher"),
        ("--part=x", "is decided by runtime.slurm.partition"),  # getopt takes abbreviations
    ],
)
def test_an_option_that_is_none_or_decided_elsewhere_is_refused(option, why):
    config = composed("hardware=cpu", "runtime=slurm", f"runtime.slurm.options=['{option}']")
    (rule,) = refusals(config)
    assert (rule.name, f"{option!r} {why}" in rule.message(config)) == ("slurm_options", True), (
        rule.message(config)
    )


@pytest.mark.parametrize(
    "option",
    [
        "--exclusive",
        "--mem=0",
        "--time-min=5",
        "--gres-flags=enforce-binding",
        "--nodelist=n1",
        "--gpu-bind=none",
    ],
)
def test_options_that_nothing_here_decides_pass(option):
    assert (
        refusals(composed("hardware=cpu", "runtime=slurm", f"runtime.slurm.options=['{option}']"))
        == []
    )


@pytest.mark.parametrize("gres", ["gpu", "gpu:mi300x", "gpu:4090", "gpu:1g.10gb"])
def test_names_of_gpus(gres):
    assert refusals(composed("hardware=cpu", "runtime=slurm", f"runtime.slurm.gres='{gres}'")) == []


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:mi300x:4", "gpu,lustre"])
def test_a_count_of_gpus_stands_in_one_place(gres):
    with pytest.raises(UserError, match=r"runtime\.slurm\.gres=.*topology\.num_gpus=N"):
        check(composed("hardware=cpu", "runtime=slurm", f"runtime.slurm.gres='{gres}'"))


def test_phases_are_no_job(launch):
    done = launch("experiment=quickstart", "runtime=slurm")
    assert done.code == 2
    assert "runtime=slurm: is for one run" in done.err


# ---- Submission


def test_submit_leaves_what_the_job_needs_and_returns(launch, tools, tmp_path):
    done = launch(*JOB)
    assert done.code == 0, done.err
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").iterdir()
    assert tools.calls() == [f"sbatch --parsable {run_dir}/job.sh"]
    assert "job 12 is submitted" in done.out
    assert json_files.read_json(run_dir / "slurm.json") == {"job": "12"}
    kept = json_files.read_json(run_dir / "record.json")
    assert (kept["status"], kept["overrides"], sealed.faults(kept)) == ("submitted", JOB, [])
    config = slurm_job.composition(run_dir)
    assert (
        composition_hash(config) == kept["composition_hash"]
    )  # the job computes what was submitted, and resumes it


def test_a_mask_of_the_submitting_shell_stays_there(launch, tools, monkeypatch, tmp_path):
    for name in ("HIP_VISIBLE_DEVICES", *slurm.MASKS):
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("MINE", "kept")
    tools.add("sbatch", f"env > {tmp_path}/seen; echo 12")
    assert launch(*JOB).code == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "MINE=kept" in seen
    assert [line for line in seen if line.endswith("=5")] == []


OF_A_SHELL = {
    "SBATCH_TIMELIMIT": "7",
    "SBATCH_PARTITION": "nope",
    "SBATCH_QOS": "usual",
    "SBATCH_SIGNAL": "B:USR2@10",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_GRES": "gpu:1",
    "SBATCH_JOB_NAME": "fromenv",
    "SBATCH_WAIT": "1",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_GPUS_PER_NODE": "2",
    "SBATCH_MEM_PER_CPU": "1G",
    "SBATCH_CONSTRAINT": "ib",
}


def test_a_variable_of_the_shell_beats_no_key(launch, tools, monkeypatch, tmp_path):
    """By these, sbatch would take it in place of what job.sh says.

    Where a key is null a site's default holds.
    """
    for name, value in OF_A_SHELL.items():
        monkeypatch.setenv(name, value)
    tools.add("sbatch", f"env > {tmp_path}/seen; echo 12")
    done = launch(
        *JOB,
        "runtime.slurm.time=30",
        "runtime.slurm.partition=main",
        "runtime.slurm.options=['--mem=0','--exclusive']",
    )
    assert done.code == 0, done.err
    seen = dict(
        line.partition("=")[::2]
        for line in (tmp_path / "seen").read_text().splitlines()
        if line.startswith("SBATCH_")
    )
    assert seen == {"SBATCH_QOS": "usual", "SBATCH_CONSTRAINT": "ib"}
    assert (
        f"the composition decides it: {', '.join(sorted(OF_A_SHELL.keys() - seen))} of this shell"
        in done.out
    )


@pytest.mark.parametrize("name", ["PARTITION", "TIMELIMIT"])
def test_a_sites_default_holds_where_its_key_is_null(launch, tools, monkeypatch, tmp_path, name):
    monkeypatch.setenv(f"SBATCH_{name}", "5")
    tools.add("sbatch", f"env > {tmp_path}/seen; echo 12")
    done = launch(*JOB)
    assert done.code == 0, done.err
    assert f"SBATCH_{name}=5" in (tmp_path / "seen").read_text().splitlines()
    assert "not passed" not in done.out


def test_submit_says_so_in_json(launch, tools):
    done = launch(*JOB, "format=json")
    said = json.loads(done.out)
    assert said["job"] == "12"
    assert Path(said["script"]).is_file()


def test_sbatch_is_absent(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    done = launch(*JOB)
    assert done.code == 3
    assert "sbatch: not found" in done.err
    assert "slurm-client" in done.err
    assert not (tmp_path / "runs").exists()


def test_sbatch_refuses(launch, tools, tmp_path):
    tools.add(
        "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
    )
    done = launch(*JOB)
    assert done.code == 3
    assert "job.sh failed: sbatch: error: Batch job submission failed: Invalid account" in done.err
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").iterdir()
    assert str(run_dir / "job.sh") in done.err
    assert json_files.read_json(run_dir / "record.json")["status"] == "failed"


def test_what_does_not_fit_is_not_submitted(launch, tools):
    done = launch(
        "runtime=slurm", "hardware=mi50", "model=qwen3_14b", "topology=single", "tracking=none"
    )
    assert done.code == 3
    assert " missing. " in done.err
    assert tools.calls() == []


def test_a_second_job_of_a_run_is_refused_until_the_first_is_gone(launch, tools, tmp_path):
    assert launch(*JOB).code == 0
    second = launch(*JOB)
    assert second.code == 2
    assert "job 12 of this run is PENDING" in second.err
    tools.add("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert launch(*JOB).code == 0
    assert (
        len(list((tmp_path / "runs/sft-tiny-cpu").iterdir())) == 1
    )  # the same run, which nothing has begun yet


def test_a_run_whose_job_runs_has_no_second_one(launch, tools, tmp_path):
    assert launch(*JOB).code == 0
    (run_dir,) = (tmp_path / "runs/sft-tiny-cpu").iterdir()
    tools.add("squeue", "echo RUNNING")
    with rundir.locked(run_dir):  # as the job's launcher does
        second = launch(*JOB)
    assert second.code == 2
    assert "job 12 of this run is RUNNING" in second.err
    assert list((tmp_path / "runs/sft-tiny-cpu").iterdir()) == [run_dir]


def test_wait_follows_the_job_that_the_run_has_already(launch, tools, monkeypatch):
    """As the trials of a sweep that was stopped do, when it goes on."""
    assert launch(*JOB).code == 0
    ended = json.dumps({"status": "done", "exit_code": 0})
    tools.add(
        "squeue",
        (
            f"cd runs/*/*; test -e asked && {{ echo '{ended}' > record.json; exit 0; }}; touch "
            "asked; echo PENDING"
        ),
    )
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.0)
    done = launch(*JOB, "runtime.slurm.wait=true")
    assert done.code == 0, done.err
    assert "job 12 of this run is PENDING." in done.out
    assert [call.split()[0] for call in tools.calls()] == ["sbatch", "squeue", "squeue"]


def test_a_job_of_another_cluster_is_asked_for_there(launch, tools, monkeypatch):
    """Name the cluster as sbatch does; without it squeue knows no such job, or another."""
    monkeypatch.setenv("SLURM_CLUSTERS", "near")
    tools.add("sbatch", "echo '12;far'; test -z \"$SLURM_CLUSTERS\"")
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    tools.add(
        "squeue",
        f'case "$*" in *--clusters=far*) echo "CLUSTER: far"; echo PENDING;; *) {gone};; esac',
    )
    first = launch(*JOB, "runtime.slurm.options=['--clusters=far']")
    assert first.code == 0, first.err
    assert (
        "`squeue -j 12 --clusters=far` shows where it is, `scancel 12 --clusters=far` ends it"
        in first.out
    )
    second = launch(*JOB, "runtime.slurm.options=['--clusters=far']")
    assert second.code == 2
    assert "of this run is PENDING." in second.err
    assert "`scancel 12 --clusters=far` first" in second.err
    ended = json.dumps({"status": "done", "exit_code": 0})
    last = f"echo '{ended}' > record.json; echo 'CLUSTER: far'; exit 0"
    tools.add("squeue", f"cd runs/*/*; test -e asked && {{ {last}; }}; touch asked; echo RUNNING")
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.0)
    assert (
        launch(*JOB, "runtime.slurm.options=['--clusters=far']", "runtime.slurm.wait=true").code
        == 0
    )


@pytest.mark.parametrize(("exit_code", "code"), [(75, 75), (None, 4)])
def test_wait_ends_with_the_jobs_exit_code(launch, tools, monkeypatch, exit_code, code):
    """End the job when squeue is asked a second time, with last words and a record."""
    ended = json.dumps({"status": "x", "exit_code": exit_code})
    last = f"echo step 1/1 > logs/slurm.log; echo '{ended}' > record.json; exit 0"
    tools.add("squeue", f"cd runs/*/*; test -e asked && {{ {last}; }}; touch asked; echo RUNNING")
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.0)
    done = launch(*JOB, "runtime.slurm.wait=true")
    assert done.code == code, done.err
    assert "step 1/1" in done.out
    assert ("the run has no end" in done.out) is (exit_code is None)


def test_a_question_that_fails_is_asked_again_while_the_job_goes_on(launch, tools, monkeypatch):
    ended = f"echo '{json.dumps({'status': 'done', 'exit_code': 0})}' > record.json; exit 0"
    busy = "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1"
    tools.add(
        "squeue",
        (
            f"cd runs/*/*; test -e again && {{ {ended}; }}; test -e asked && touch again; touch "
            f"asked; {busy}"
        ),
    )
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.0)
    done = launch(*JOB, "runtime.slurm.wait=true")
    assert done.code == 0, done.err
    assert done.out.count("Socket timed out on send/recv operation") == 1


def test_a_controller_that_never_answers_ends_the_watching(launch, tools, monkeypatch):
    tools.add("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setattr(slurm, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(slurm, "PATIENCE_S", 0.0)
    done = launch(*JOB, "runtime.slurm.wait=true")
    assert done.code == 3
    assert "Unable to contact slurm controller" in done.err


def test_ctrl_c_ends_the_watching_and_not_the_job(launch, tools):
    tools.add("squeue", f"kill -INT {os.getpid()}; echo RUNNING")
    done = launch(*JOB, "runtime.slurm.wait=true")
    assert done.code == 75
    assert "`scancel 12` ends it." in done.out
    assert not any(call.startswith("scancel") for call in tools.calls())
