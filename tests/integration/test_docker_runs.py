"""Test runtime=docker with a real engine.

Recipes train in the cpu image as a user who is not root, and nothing is left behind. Device nodes
are made with mknod, and the engine really passes them. `cpu_image`, `engine` and `registry` are in
conftest.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest

from containers import images
from containers.images import LABEL
from launch.core import json_files
from tests.integration.conftest import PATIENCE_S, lock_of, wait_until
from tests.integration.users import UID, Caller, gpu_gids

pytestmark = pytest.mark.integration
SMOKE = ["runtime=docker", "container=cpu", "smoke=true"]
# Longer than any test waits.
LONG = """
hardware=cpu container=cpu model=tiny data.num_train=64
method.args.max_steps=100000 method.args.logging_steps=1
""".split()


def is_past(run: Path, step: int) -> bool:
    return any(row["step"] > step for row in json_files.read_metrics(run / "metrics.jsonl"))


# Not tmp_path: every start of pytest closes its directories to all but their owner.
def open_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """Return ~/.cache of every caller, so that only the first container compiles Python code."""
    folder = open_folder("cache")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def caller(engine, cpu_image, cache) -> Iterator[Caller]:
    caller = Caller(open_folder("caller"), cache, engine)
    yield caller
    caller.leave()


def owners(folder: Path) -> set[int]:
    return {path.lstat().st_uid for path in [folder, *folder.rglob("*")]}


@pytest.mark.usefixtures("nothing_is_left")
def test_an_image_is_built_and_its_files_are_the_callers(caller, base, remove):
    lock = lock_of(caller.home, base)
    remove.append(images.load.__wrapped__(lock)["tiny"].local_reference)
    done = caller.run("image=tiny", f"lock={lock}", program="containers/build.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(caller.cache.rglob("*.whl"))
    assert owners(caller.cache) == {caller.uid}


def test_two_processes_train_inside(caller):
    done = caller.run(*SMOKE, "method=grpo", "hardware=mi300x", "model=qwen3_4b", "topology=split")
    assert done.returncode == 0, done.stdout + done.stderr
    run = caller.newest_run()
    result, record = (
        json.loads((run / name).read_text()) for name in ("result.json", "record.json")
    )
    assert (result["status"], record["status"]) == ("done", "done")
    assert record["image"]["id"] == caller.engine.images.get(record["image"]["reference"]).id
    assert record["image"]["labels"]["torch"].startswith("2.13.0")
    assert owners(caller.home) == owners(caller.cache) == {caller.uid}, (
        "every file it leaves is the caller's"
    )
    lines = [line for log in (run / "logs").glob("*.log") for line in log.read_text().splitlines()]
    shown = [line.partition(" | ") for line in done.stderr.splitlines()]
    assert any(name in ("trainers", "rank 0") and line in lines for name, _, line in shown)
    assert caller.containers() == []
    assert json_files.read_metrics(run / "metrics.jsonl")[-1]["step"] == 2


def test_a_container_is_confined_and_saves_on_a_signal_and_the_run_resumes(caller):
    plan = json.loads(caller.run(*LONG, "mode=plan", "format=json").stdout)
    planned = plan["processes"][0]["container"]
    with caller.running(*LONG) as launcher:
        container = caller.container(launcher)
        run = Path(container.labels[f"{LABEL}.run"])
        host_config = container.attrs["HostConfig"]
        gid = caller.uid if os.getuid() == 0 else os.getgid()
        assert container.attrs["Config"]["User"] == planned["user"] == f"{caller.uid}:{gid}"
        assert host_config["Privileged"] is False
        assert host_config["CapDrop"] == ["ALL"]
        assert not host_config["Devices"]
        assert host_config["ShmSize"] == 16_000_000_000
        mounts = container.attrs["Mounts"]
        assert not any("docker.sock" in mount["Source"] for mount in mounts)
        writable = {Path(mount["Source"]).parent for mount in mounts if mount["RW"]}
        assert writable >= {caller.cache / "rocm-recipes/home", caller.cache}
        code, own = caller.root / "x", f"{caller.cache}/rocm-recipes/home/cpu/x"
        assert container.exec_run(["touch", str(code)]).exit_code != 0, "the code is read-only"
        assert container.exec_run(["touch", own]).exit_code == 0
        saved = stop(caller, launcher, run, signal.SIGTERM, after_step=0)
    with caller.running(*LONG) as launcher:
        caller.container(launcher)
        last = stop(caller, launcher, run, signal.SIGINT, after_step=saved)
    assert last > saved
    log = (run / "logs/trainers.log").read_text()
    assert f"resuming from {run}/checkpoints/checkpoint-{saved}" in log


def stop(
    caller: Caller, launcher: subprocess.Popen, run: Path, number: int, after_step: int
) -> int:
    """Signal the launcher after a step; return the step of the checkpoint that it saves."""
    wait_until(functools.partial(is_past, run, after_step), launcher)
    launcher.send_signal(number)
    output = launcher.communicate(timeout=PATIENCE_S)[0]
    assert launcher.returncode == 75, output
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
    assert caller.containers() == []
    checkpoints = (run / "checkpoints").glob("checkpoint-*")
    return max(int(path.name.rpartition("-")[2]) for path in checkpoints)


@contextmanager
def device_nodes() -> Iterator[None]:
    """Make /dev/kfd and eight render nodes as amdgpu does, and the group `render`, as root."""
    made: list[Path] = []
    known = "render" in Path("/etc/group").read_text()
    if not known:
        subprocess.run(["groupadd", "--system", "render"], check=True)
    folder = Path("/dev/dri").exists()
    Path("/dev/dri").mkdir(exist_ok=True)
    nodes = {"/dev/kfd": (511, 0)} | {f"/dev/dri/renderD{n}": (226, n) for n in range(128, 136)}
    try:
        for path, (major, minor) in nodes.items():
            if not Path(path).exists():
                os.mknod(path, stat.S_IFCHR | 0o660, os.makedev(major, minor))
                made.append(Path(path))
                shutil.chown(path, group="render")
                Path(path).chmod(0o660)
        yield
    finally:
        for path in made:
            path.unlink()
        if not folder:
            Path("/dev/dri").rmdir()
        if not known:
            subprocess.run(["groupdel", "render"], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="device nodes are made by root only")
def test_only_the_chosen_gpu_is_inside(caller, engine):
    with device_nodes():
        # One of these groups has just been made.
        caller.identity["extra_groups"] = [*caller.identity["extra_groups"], *gpu_gids()]
        long = ["hardware=mi300x", "model=qwen3_4b", *SMOKE]
        with caller.running(*long, HIP_VISIBLE_DEVICES="5") as launcher:
            container = caller.container(launcher)
            nodes = container.exec_run(
                "find /dev -type c ( -name kfd -o -path /dev/dri/* )".split()
            ).output
            groups = container.exec_run(["id", "-G"]).output.split()
            can = container.exec_run(
                ["sh", "-c", "test -r /dev/kfd && test -w /dev/kfd && test -w /dev/dri/renderD133"]
            ).exit_code
            launcher.communicate(timeout=PATIENCE_S)
            assert launcher.returncode == 0
        assert sorted(nodes.decode().split()) == ["/dev/dri/renderD133", "/dev/kfd"]
        assert {int(g) for g in groups} == {UID, *caller.identity["extra_groups"]} >= gpu_gids()
        assert can == 0, "the groups open the nodes to a user who is not root"


SENTINELS = {
    "HF_TOKEN": "hf_sentinel_4f1c",
    # Would be passed as a variable of the stack if it were not listed.
    "NCCL_MY_KEY": "nccl_sentinel_03d7",
    "WANDB_API_KEY": "wandb_sentinel_9b2e",
    "HTTPS_PROXY": "http://user:proxy_sentinel_77aa@127.0.0.1:9",
    "MY_KEY": "my_sentinel_51d0",
}


def test_secrets_reach_the_processes_and_stand_nowhere(caller, engine, cpu_image):
    secrets = f"runtime.secrets=[{','.join(SENTINELS)}]"
    overrides = [*SMOKE, "runtime.network=none", secrets, "user_env.NO_PROXY='*'"]
    with caller.running(*overrides, **SENTINELS) as launcher:
        container = caller.container(launcher)
        inspected = json.dumps(engine.api.inspect_container(container.id))
        values = list(SENTINELS.values())
        code = f"import os; print(sum(v in os.environ.values() for v in {values}))"
        enter = ["python3", str(caller.root / "containers/enter.py"), "python3", "-c", code]
        reached = container.exec_run(enter)
        modes = container.exec_run(["sh", "-c", "stat -c %a /run/secrets/*"]).output.split()
        engines_copy = b""
        if os.getuid() == 0:
            files = Path("/var/lib/docker/containers", container.id).glob("*")
            engines_copy = b"".join(path.read_bytes() for path in files if path.is_file())
        output = launcher.communicate(timeout=PATIENCE_S)[0]
        assert launcher.returncode == 0, output
    assert reached.output.strip() == str(len(SENTINELS)).encode()
    assert set(modes) == {b"400"}
    run = caller.newest_run()
    paths = [*caller.home.rglob("*"), *caller.cache.rglob("*")]
    files = [path for path in paths if path.is_file()]
    image = engine.images.get(cpu_image)
    searched = {
        "docker inspect of the container": inspected.encode(),
        "the engine's own files of the container": engines_copy,
        "the launcher's output": output.encode(),
        "run directory, caches and home": b"".join(path.read_bytes() for path in files),
        "image history": json.dumps(image.history()).encode(),
        "docker inspect of the image": json.dumps(image.attrs).encode(),
        "the plan": caller.run(*overrides, "mode=plan", "format=json", **SENTINELS).stdout.encode(),
    }
    for place, content in searched.items():
        leaked = [name for name, value in SENTINELS.items() if value.encode() in content]
        assert leaked == [], f"{place} holds {leaked}"
    assert run / "record.json" in files
    record = json.loads((run / "record.json").read_text())
    assert set(SENTINELS) <= set(record["secrets"]), "by name"
    assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*")), "gone with the run"


def trains(containers: list[docker.models.containers.Container]) -> bool:
    run_dirs = [Path(container.labels[f"{LABEL}.run"]) for container in containers]
    return any((run_dir / "metrics.jsonl").exists() for run_dir in run_dirs)


def test_a_killed_launcher_leaves_nothing_after_the_next_start(caller, engine, cpu_image):
    """Foreign containers stay; the next start ends though its terminal goes away."""
    labels = {f"{LABEL}.run": str(caller.home), f"{LABEL}.process": "trainers"}
    foreign = [  # of another name, and of another uid too
        engine.containers.run(
            cpu_image,
            ["sleep", "3600"],
            detach=True,
            labels=labels | {f"{LABEL}.uid": str(uid)},
            init=True,
        )
        for uid in (caller.uid, 1)
    ]
    known = {container.id for container in caller.containers()}
    try:
        for is_time in (bool, trains):  # as its container is made, and in training
            with caller.starting(*LONG, "resume=never", **SENTINELS) as launcher:
                wait_until(
                    lambda: is_time([c for c in caller.containers() if c.id not in known]),  # noqa: B023
                    launcher,
                )
                launcher.kill()
            left = {container.id for container in caller.containers()} - known
            assert left, "it was killed while its container was there"
            known |= left
        close_its_terminal(caller)
        assert {c.id for c in caller.containers()} == {foreign[0].id}
        assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*"))
        for container in foreign:
            container.reload()
            assert (container.status, container.attrs["RestartCount"]) == ("running", 0)
    finally:
        for container in [*foreign, *caller.containers()]:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)


def close_its_terminal(caller: Caller) -> None:
    """Close the pipe like `2>&1 | head`: the run continues, and its log is whole."""
    with caller.starting(*SMOKE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
        while not launcher.stderr.readline().startswith("trainers | "):
            assert launcher.poll() is None
        launcher.stderr.close()
        assert launcher.wait(timeout=PATIENCE_S) == 0
    run = caller.newest_run()
    assert json.loads((run / "record.json").read_text())["status"] == "done"
    assert "done: 2 steps" in (run / "logs/trainers.log").read_text()


def test_killed_for_memory(caller):
    done = caller.run(*SMOKE, "runtime.memory_gb=0.3")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "killed because it exceeded its limit of 0.3 GB (runtime.memory_gb)" in done.stdout
    assert caller.containers() == []


def test_container_removed_by_somebody_else(caller):
    with caller.running(*LONG) as launcher:
        caller.container(launcher).remove(force=True)
        output = launcher.communicate(timeout=PATIENCE_S)[0]
        assert launcher.returncode == 4
        assert "trainers failed" in output


def test_socket_not_permitted_and_image_not_built(caller):
    refused = caller.run("hardware=mi300x", "model=qwen3_4b", "container=rocm", "smoke=true")
    assert refused.returncode == 3
    assert "containers/build.py image=rocm" in refused.stderr
    if os.getuid() == 0:
        caller.identity["extra_groups"] = []
        refused = caller.run(*SMOKE)
        assert refused.returncode == 3
        assert "usermod -aG docker" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_an_image_of_ones_own_is_pulled_by_its_digest(caller, engine, base):
    """Use the base without packages of ours, so the image is pulled and its program fails."""
    engine.images.remove(base)
    done = caller.run(
        "container=custom", f"container.reference={base}", "smoke=true", "hardware=cpu"
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "No module named" in done.stdout
    record = json.loads((caller.newest_run() / "record.json").read_text())
    # The engine keeps digests of other registries too.
    assert base in record["image"]["repo_digests"]
    assert record["image"]["verified"] is True
