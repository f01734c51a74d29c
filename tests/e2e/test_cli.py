"""What a person does with the command, for real: train on the CPU, stop, resume, crash, reproduce, evaluate, export."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import reproduce
from launch.errors import EXIT_DONE
from launch.files import rundir, sealed
from launch.reproduce import compare_metrics
from tests.conftest import ROOT, command

SMALL = ["hardware=cpu", "data.num_train=64", "data.num_heldout=16", "method.args.logging_steps=1", "method.args.save_steps=2"]
METHODS = {  # of which a test starts the command; test_resume.py trains with every method
    "sft": ["method=sft", "method.args.max_steps=4", "method.args.per_device_train_batch_size=4"],
    "grpo": ["method=grpo", "method.args.max_steps=4", "method.args.max_completion_length=6"],
}


def newest(root: Path) -> Path:
    return max((p.parent for p in root.glob("runs/*/*/record.json")), key=lambda p: p.stat().st_mtime)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """method -> a finished run of it."""
    found = {}
    for method, overrides in METHODS.items():
        root = tmp_path_factory.mktemp(method)
        done = command(*SMALL, *overrides, cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
        found[method] = (newest(root), done)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_what_the_contract_says(trained, method):
    run, done = trained[method]
    for name in ("config.yaml", "plan.json", "record.json", "metrics.jsonl", "result.json", "logs/trainers.log", "model/config.json"):
        assert (run / name).is_file(), name
    assert list((run / "model").glob("*.safetensors"))
    assert not list(run.rglob("*.bin"))
    rows = rundir.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    wanted = {"step", "time_s", "loss", "tokens_per_second", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_peak_gb"}
    assert wanted <= set(rows[-1])
    kept = json.loads((run / "record.json").read_text())
    assert sealed.faults(kept) == []
    assert (kept["status"], kept["exit_code"], kept["result"]["status"]) == ("done", 0, "done")
    assert "Everything is in" in done.stdout


def test_reproduce_is_equal_to_the_last_digit(trained):
    run, _ = trained["grpo"]
    done = subprocess.run([sys.executable, str(ROOT / "launch/reproduce.py"), str(run)], cwd=run.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 4 lines of metrics and the results, to the last digit" in done.stdout
    assert "difference(s) in code" in done.stdout
    assert not any(part in done.stdout for part in ("packages.", "composition.", "data.", "host."))


def test_reproduce_names_a_difference_and_fails_on_other_metrics(trained, tmp_path, monkeypatch, capsys):
    """A record of other packages and of a loss that never was: named, and not equal; everything else is."""
    run, _ = trained["sft"]
    kept = json.loads((run / "record.json").read_text())
    kept["packages"]["trl"] = "0.0.1"
    copy = tmp_path / "runs/x/1"
    copy.mkdir(parents=True)
    (copy / "result.json").write_text((run / "result.json").read_text())
    rows = rundir.read_metrics(run / "metrics.jsonl")
    rows[3]["loss"] += 1e-12
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rundir.write_json(copy / "record.json", sealed.seal(kept))

    def trains_the_same(plan, *_, **__):
        shutil.copytree(run, plan.run_dir)
        return EXIT_DONE

    monkeypatch.setattr(reproduce, "execute", trains_the_same)
    assert reproduce.main([str(copy)]) == 4
    said = capsys.readouterr().out
    assert "packages.trl: 0.0.1 -> 1.16.0" in said
    assert "1 figure(s) differ; the first: step 4, loss" in said


def start(root: Path, *overrides: str) -> subprocess.Popen:
    argv = [sys.executable, str(ROOT / "launch/run.py"), *SMALL, *overrides]
    return subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(root: Path, child: subprocess.Popen, step: int) -> Path:
    """Until metrics.jsonl shows the step: the run is in the middle."""
    while child.poll() is None:
        for file in root.glob("runs/*/*/metrics.jsonl"):
            if any(row["step"] >= step for row in rundir.read_metrics(file)):
                return file.parent
        time.sleep(0.05)
    raise AssertionError(f"the run ended before step {step}: {child.stdout.read()}")


LONG = ["method=sft", "method.args.max_steps=40", "method.args.per_device_train_batch_size=4"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    done = command(*SMALL, *LONG, cwd=root)
    assert done.returncode == 0, done.stdout
    return newest(root)


def same(run: Path, other: Path) -> None:
    assert compare_metrics(rundir.read_metrics(other / "metrics.jsonl"), rundir.read_metrics(run / "metrics.jsonl")) == []
    results = [rundir.read_json(folder / "result.json") for folder in (run, other)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_a_run_that_is_stopped_and_killed_goes_on_by_the_same_command(tmp_path, uninterrupted):
    child = start(tmp_path, *LONG)
    run = wait_for_step(tmp_path, child, 3)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 75, output
    assert "the same command resumes it" in output
    done_steps = rundir.read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert done_steps < 40
    assert (run / f"checkpoints/checkpoint-{done_steps}/manifest.json").is_file()
    child = start(tmp_path, *LONG)
    wait_for_step(tmp_path, child, done_steps + 3)
    os.kill(ranks(run)[-1], signal.SIGKILL)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 4, output
    assert "trainers failed" in output
    assert "Last lines of" in output
    assert json.loads((run / "record.json").read_text())["status"] == "failed"
    assert ranks(run) == []
    last = command(*SMALL, *LONG, cwd=tmp_path)
    assert last.returncode == 0, last.stdout
    assert "Continues" in last.stdout
    assert [record.parent for record in tmp_path.glob("runs/*/*/record.json")] == [run]
    same(run, uninterrupted)


def ranks(run: Path) -> list[int]:
    """Processes that run a recipe for this run, torchrun first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run / "config.yaml").encode() in words:
            found.append(int(folder.name))
    return sorted(found)


def test_smoke_of_an_eight_gpu_composition_with_an_adapter_whose_model_stands_alone(tmp_path):
    done = command("hardware=mi350x", "method=grpo", "model=qwen3_4b", "topology=ddp", "adapter=lora", "smoke=true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke: in place of topology.num_gpus=8: two processes" in done.stdout
    rows = rundir.read_metrics(newest(tmp_path) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert (newest(tmp_path) / "model/config.json").is_file()


def test_evaluate_a_runs_model(trained, tmp_path):
    run, _ = trained["sft"]
    done = command(
        "hardware=cpu",
        "method=evaluate",
        f"model.path={run / 'model'}",
        "data.num_heldout=16",
        "method.args.max_new_tokens=4",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = rundir.read_json(newest(tmp_path) / "result.json")
    assert 0 <= result["accuracy"] <= 1
    assert result["num_problems"] == 16


def test_export_a_run(trained, tmp_path):
    run, _ = trained["sft"]
    done = command("hardware=cpu", "method=export", f"model.path={run}", "method.args.weights=bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = rundir.read_json(newest(tmp_path) / "record.json")
    assert {"model/README.md", "model/model.safetensors", "model/tokenizer.json", "model/chat_template.jinja"} <= set(kept["outputs"])
    assert 0 < kept["result"]["weights_error"] < 2**-9
    card = (newest(tmp_path) / "model/README.md").read_text()
    said = ("with random weights by sft.", run.name, "method.args.max_steps=4", "64 generated problems", "steps 4", "Not stated")
    assert [words for words in said if words not in card] == []


def test_a_users_own_data_and_reward(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brevity(completions, **_):\n    return [1.0 / (1 + len(c[0]['content'])) for c in completions]\n"
    )
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": f"say {n}"}]}) + "\n" for n in range(16))
    )
    own = ["data=jsonl", "data.path=train.jsonl", "~method.rewards.reasoning_gym", "++method.rewards={mine.brevity: 1.0}"]
    small = ["method.args.max_steps=1", "method.args.max_completion_length=6", "method.args.per_device_train_batch_size=8"]
    done = command("hardware=cpu", "method=grpo", *own, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rundir.read_metrics(newest(tmp_path) / "metrics.jsonl")[-1]["reward"] > 0


def test_a_ranks_own_refusal_is_a_users_error(tmp_path):
    done = command("hardware=cpu", "data.tasks=[{name: gcd, config: {min_numbers: 1}}]", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "data.tasks: gcd refuses its configuration {'min_numbers': 1}: " in done.stdout
    assert "Traceback" not in done.stdout
