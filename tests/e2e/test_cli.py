"""Test the command as a user runs it: train, stop, resume, reproduce, export.

Starting a rank costs ten seconds of CPU time, so one run serves most of these tests.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import reproduce
from launch.core import json_files
from launch.core.errors import EXIT_DONE
from launch.plan import sealed
from tests.conftest import ROOT, command
from tests.helpers.exports import run_export

RUN_DIRECTORY = ROOT / "docs/reference/run_directory.md"
STEPS = 16
# GRPO with the user's prompts and reward.
OWN = f"""
hardware=cpu method=grpo data=jsonl data.path=train.jsonl data.heldout_path=heldout.jsonl
~method.rewards.reasoning_gym ++method.rewards={{mine.brevity:1.0}}
method.args.max_steps={STEPS} method.args.logging_steps=1 method.args.max_completion_length=6
method.args.per_device_train_batch_size=8 method.args.save_steps=2
""".split()
REWARD = """
def brevity(completions, **_):
    return [1.0 / (1 + len(c[0]["content"])) for c in completions]
"""
FIGURES = set(
    """
step time_s loss tokens_per_second tokens_per_second_per_gpu tflops_per_gpu mfu memory_peak_gb
""".split()
)


def newest(root: Path) -> Path:
    return max(
        (p.parent for p in root.glob("runs/*/[0-9]*/record.json")), key=lambda p: p.stat().st_mtime
    )


def wait_for_step(root: Path, child: subprocess.Popen, step: int) -> Path:
    """Wait until metrics.jsonl contains the step; return the run directory."""
    while child.poll() is None:
        for file in root.glob("runs/*/[0-9]*/metrics.jsonl"):
            if any(row["step"] >= step for row in json_files.read_metrics(file)):
                return file.parent
        time.sleep(0.05)
    raise AssertionError(f"the run ended before step {step}: {child.stdout.read()}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run that was stopped by SIGTERM and finished by the same command, and its output."""
    root = tmp_path_factory.mktemp("own")
    (root / "mine.py").write_text(REWARD)
    prompts = ({"prompt": [{"role": "user", "content": f"say {n}"}]} for n in range(16))
    lines = [json.dumps(row) + "\n" for row in prompts]
    (root / "train.jsonl").write_text("".join(lines[:12]))
    (root / "heldout.jsonl").write_text("".join(lines[12:]))
    with subprocess.Popen(
        [sys.executable, str(ROOT / "launch/run.py"), *OWN],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        run = wait_for_step(root, child, 6)  # in the second epoch
        child.send_signal(signal.SIGTERM)
        stopped, _ = child.communicate(timeout=120)
    assert child.returncode == 75, stopped
    assert "the same command resumes it" in stopped
    last_step = json_files.read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert last_step < STEPS
    assert (run / f"checkpoints/checkpoint-{last_step}/manifest.json").is_file()
    finished = command(*OWN, cwd=root)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return run, finished.stdout


def test_the_same_command_resumes_a_stopped_run(trained):
    run, printed = trained
    assert "Resuming" in printed
    assert "Everything is in" in printed
    assert [record.parent for record in run.parents[2].glob("runs/*/[0-9]*/record.json")] == [run]


def test_a_run_writes_its_documented_files(trained):
    run, _ = trained
    files = "config.yaml plan.json record.json metrics.jsonl result.json logs/trainers.log"
    assert [name for name in files.split() if not (run / name).is_file()] == []
    documented = re.findall(r"^\| `([^`]+)`", RUN_DIRECTORY.read_text(), re.MULTILINE)
    assert {path.name for path in run.iterdir()} <= {name.rstrip("/") for name in documented}
    assert list((run / "model").glob("*.safetensors"))
    assert not list(run.rglob("*.bin"))
    rows = json_files.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert set(rows[-1]) >= FIGURES
    assert rows[-1]["reward"] > 0, "by the user's own reward"
    stored = json.loads((run / "record.json").read_text())
    assert sealed.problems(stored) == []
    ended = (stored["status"], stored["exit_code"], stored["result"]["status"])
    assert ended == ("done", 0, "done")
    model = {f"model/{path.name}" for path in (run / "model").iterdir()}
    assert model <= set(stored["outputs"]), "the record has the hash of what the run leaves"


def test_reproduce_is_equal_to_the_last_digit(trained):
    """The reproduction is not interrupted, so a resumed run equals it."""
    run, _ = trained
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/reproduce.py"), str(run)],
        cwd=run.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal: {STEPS} lines of metrics and the results, to the last digit" in done.stdout
    assert "difference(s) in code" in done.stdout
    assert not any(part in done.stdout for part in ("packages.", "composition.", "data.", "host."))


def test_reproduce_shows_a_difference_and_fails_on_other_metrics(
    trained, tmp_path, monkeypatch, capsys
):
    """After a change of a package and a loss, both are reported and all else is equal."""
    run, _ = trained
    stored = json.loads((run / "record.json").read_text())
    stored["packages"]["trl"] = "0.0.1"
    copy = tmp_path / "runs/x/1"
    copy.mkdir(parents=True)
    (copy / "result.json").write_text((run / "result.json").read_text())
    rows = json_files.read_metrics(run / "metrics.jsonl")
    rows[3]["loss"] += 1e-12
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    json_files.write_json(copy / "record.json", sealed.seal(stored))
    monkeypatch.chdir(run.parents[2])
    monkeypatch.setattr(
        reproduce,
        "execute",
        lambda plan, *_, **__: shutil.copytree(run, plan.run_dir) and EXIT_DONE,
    )
    assert reproduce.main([str(copy)]) == 4
    printed = capsys.readouterr().out
    assert "packages.trl: 0.0.1 -> 1.16.0" in printed
    assert "1 difference(s), the first: step 4, loss" in printed


def test_the_offered_evaluation_measures_the_users_own_reward(trained):
    """The rows have only a question."""
    run, printed = trained
    root = run.parents[2]
    (offered,) = re.findall(r"^  evaluate +python \S+ (.*)$", printed, re.MULTILINE)
    several = ["method.args.samples_per_prompt=2", "method.args.temperature=1.0"]
    done = command(*shlex.split(offered), *several, "name=after", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((newest(root) / "result.json").read_text())
    assert (result["num_problems"], result["num_samples"]) == (4, 8)
    low, high = result["interval"]
    assert low <= result["reward"] <= high
    assert result["reward"] == pytest.approx(sum(result["reward_per_problem"]) / 4)
    assert not {"accuracy", "pass_at_k"} & result.keys()


def test_export_a_run(trained, tmp_path):
    run, _ = trained
    code, result, exported = run_export(tmp_path, run, "method.args.weights=bf16")
    assert code == 0
    files = {path.name for path in (exported / "model").iterdir()}
    assert files >= {"README.md", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert 0 < result["weights_error"] < 2**-9
    card = (exported / "model/README.md").read_text()
    expected = (
        "with random weights by grpo.",
        run.name,
        f"method.args.max_steps={STEPS}",
        "train.jsonl",
        f"steps: {STEPS}",
        "Unknown at export",
    )
    assert [words for words in expected if words not in card] == []


def test_smoke_of_an_eight_gpu_composition_with_an_adapter_and_a_curriculum(tmp_path):
    """On two ranks, the model is saved without an adapter, and both sample the same levels."""
    done = command(
        *"hardware=mi350x method=grpo model=qwen3_4b topology=ddp adapter=lora smoke=true".split(),
        "data.tasks=[{name: chain_sum, level: 0}, {name: chain_sum, level: 1}]",
        "data.curriculum=mixed",
        "data.num_train=40",
        "data.num_heldout=0",
        "method.args.max_steps=4",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke=true replaces topology.num_gpus=8: two processes" in done.stdout
    run = newest(tmp_path)
    rows = json_files.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    half = len(rows) // 2
    shares = [row["level_share/1"] for row in rows]
    assert shares == pytest.approx([0.0] * half + [0.7] * half)
    assert json.loads((run / "data.json").read_text())["by_level"] == {"0": 20, "1": 20}
    assert (run / "model/config.json").is_file()
