"""Test containers without an engine: golden commands of Apptainer and of srun with pyxis.

`UPDATE_GOLDEN=1 pytest <this file>` rewrites the golden files, with one argument per line; read the
diff.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.core.errors import HostError, UserError
from launch.execution import apptainer
from launch.execution.execute import check_host
from launch.execution.slurm_process import PyxisProcess
from launch.plan import local_copies
from launch.plan.container import image_reference
from launch.plan.container_argv import on_host, sif
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/containers"
DIGEST = f"example.org/me/rocm@sha256:{'a' * 64}"
PUSHED = ["container=custom", f"container.reference={DIGEST}"]
TWO_NODES = "runtime.slurm.nodes=2 runtime.slurm.interface=ib0 topology=fsdp".split()
PYXIS = ["runtime=slurm", "runtime.slurm.container=pyxis"]
CASES = {
    "apptainer_chat": ["runtime=apptainer", "method=chat", *PUSHED],
    "apptainer_split": ["runtime=apptainer", "method=grpo", *PUSHED],
    "pyxis_nodes": [*TWO_NODES, *PYXIS, *PUSHED, "runtime.secrets=[HF_TOKEN]"],
}


def plan_of(*overrides: str, run_dir: str = "/runs/golden, 1/1", **environ: str):
    config, _ = prepare(composed("hardware=mi300x", "model=qwen3_0_6b", "name=golden", *overrides))
    return make_plan(config, host_with(8, **environ), Path(run_dir))


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    run_dir = "/runs/golden/1" if "pyxis" in case else "/runs/golden, 1/1"
    plan = plan_of(*CASES[case], run_dir=run_dir, HF_TOKEN="hf_sentinel", NCCL_DEBUG="WARN")
    started = [on_host(process, plan.containers[process.name]) for process in plan.processes]
    text = "\n\n".join("\n".join(process.argv) for process in started) + "\n"
    text = text.replace(str(ROOT), "<repository>")
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    assert "hf_sentinel" not in text + str(started)
    for process in started:
        gpus = process.env["HIP_VISIBLE_DEVICES"]
        assert gpus == ",".join(map(str, process.gpus)), "the host's indices"


def test_pyxis_cannot_mount_every_path():
    with pytest.raises(UserError, match=r"/runs/golden, 1/1 .*container=apptainer"):
        plan_of(*PYXIS, *PUSHED)


@pytest.mark.parametrize(("overrides", "srun", "words"), [
    (PYXIS + PUSHED, "exit 0", "--container-image"),
    (PYXIS, "echo --container-image", "container=cpu: .*push="),
    (["runtime=apptainer"], "", "`apptainer` is not on the PATH"),
])  # fmt: skip
def test_a_host_without_the_program_or_the_image_is_rejected(
    tools, monkeypatch, overrides, srun, words
):
    tools.add("srun", srun)
    monkeypatch.setenv("PATH", str(tools.folder))
    plan = plan_of(*overrides, "smoke=true", run_dir="/runs/golden/1")
    with pytest.raises(HostError, match=words):
        check_host(plan, host_with(8))


@pytest.mark.parametrize("image", [PUSHED, []])
def test_pyxis_needs_a_pushed_image(image):
    plan = plan_of(*PYXIS, *image, run_dir="/runs/golden/1")
    assert any("push=" in warning for warning in plan.warnings) == (image == [])


def test_apptainer_converts_an_image_that_is_built_first(tools, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tools.folder))
    config = plan_of("runtime=apptainer").config
    host = host_with(8, XDG_CACHE_HOME=str(tmp_path), DOCKER_HOST="unix:///no/such/engine")
    assert "not on the PATH" in local_copies.image(config, host)
    build = "python containers/build.py image=rocm"
    assert local_copies.build_command(config, host) == build
    tools.add("apptainer", "exit 0")
    file = sif(config, host, image_reference(config))
    file.parent.mkdir(parents=True)
    file.touch()
    assert local_copies.image(config, host).endswith(f": in {file}")
    assert local_copies.build_command(config, host) is None


def test_an_interrupted_conversion_removes_its_files(tools, tmp_path):
    temporary, is_ready = tmp_path / "temporary", tmp_path / "is_ready"
    script = """
        trap 'rm -r {0}; exit 1' TERM
        mkdir {0}; touch $2 {1}
        while :; do sleep 0.02; done
    """
    tools.add("apptainer", script.format(temporary, is_ready))
    plan = plan_of("runtime=apptainer", *PUSHED)

    def interrupt() -> None:
        while not is_ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(SystemExit):
            apptainer.convert(plan, host_with(8, XDG_CACHE_HOME=str(tmp_path)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not temporary.exists()
    assert not [*(tmp_path / "rocm-recipes/sif").iterdir()]


def test_pyxis_with_its_plugin_and_a_pushed_image(tools):
    tools.add("srun", "echo --container-image")
    plan = plan_of(*PYXIS, *PUSHED, "smoke=true", run_dir="/runs/golden/1")
    assert check_host(plan, host_with(8))["repo_digests"] == [DIGEST]


def test_pyxis_signals_the_tasks_and_not_srun(tools, monkeypatch, tmp_path):
    """On SIGTERM, srun kills its step, so no rank could save."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    signalled = tmp_path / "signalled"
    tools.add("srun", "while ! test -e finished; do sleep 0.02; done")
    tools.add("squeue", "echo '7.batch batch'; echo '7.0 trainers-1'; echo '7.1 trainers'")
    tools.add("scancel", f'echo "$@" >> {signalled}')
    monkeypatch.chdir(tmp_path)
    plan = plan_of(*TWO_NODES, *PYXIS, *PUSHED, run_dir="/runs/golden/1")
    process = next(process for process in plan.processes if process.name == "trainers")
    group = PyxisProcess(on_host(process, plan.containers["trainers"]), tmp_path / "log")
    try:
        group.terminate()
        assert signalled.read_text().split() == ["--signal=TERM", "7.1"]
        assert group.poll() is None
    finally:
        (tmp_path / "finished").touch()
        group.wait(10)
        group.remove()
