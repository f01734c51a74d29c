"""Test runtime=docker with a real engine, in the cpu image, as a user who is not root.

Tests create device nodes with mknod.
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

import datasets
import docker
import pytest

from containers import images
from containers.images import LABEL
from launch.core import json_files
from tests.helpers.hub_data import RIGHT
from tests.integration.conftest import PATIENCE_S, lock_of, skip_without, wait_until
from tests.integration.users import UID, Caller, gpu_gids

pytestmark = pytest.mark.integration
SMOKE = ["runtime=docker", "container=cpu", "smoke=true"]
# A run that is longer than any test.
LONG = """
hardware=cpu container=cpu model=tiny data.num_train=64
method.args.max_steps=100000 method.args.logging_steps=1
""".split()


def is_past(run: Path, step: int) -> bool:
    return any(row["step"] > step for row in json_files.read_metrics(run / "metrics.jsonl"))


# Other users cannot read tmp_path.
def open_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """Yield a ~/.cache for all tests, so that only the first container compiles Python code."""
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
def test_build_leaves_no_files(caller, base, remove):
    lock = lock_of(caller.home, base)
    remove.append(images.load.__wrapped__(lock)["tiny"].local_reference)
    before = set(caller.home.rglob("*"))
    done = caller.run("image=tiny", f"lock={lock}", program="containers/build.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(caller.home.rglob("*")) == before


def test_train_with_two_processes(caller):
    done = caller.run(*SMOKE, "method=grpo", "hardware=mi300x", "model=qwen3_4b", "topology=split")
    assert done.returncode == 0, done.stdout + done.stderr
    run = caller.newest_run()
    result, record = (
        json.loads((run / name).read_text()) for name in ("result.json", "record.json")
    )
    assert (result["status"], record["status"]) == ("done", "done")
    assert record["image"]["id"] == caller.engine.images.get(record["image"]["reference"]).id
    assert record["image"]["labels"]["torch"].startswith("2.13.0")
    assert record["image"]["labels"]["torch"] == record["packages"]["torch"]
    assert "pytest" not in record["packages"]  # which this Python has
    assert owners(caller.home) == owners(caller.cache) == {caller.uid}, (
        "all files belong to the caller"
    )
    lines = [line for log in (run / "logs").glob("*.log") for line in log.read_text().splitlines()]
    shown = [line.partition(" | ") for line in done.stderr.splitlines()]
    assert any(name in ("trainers", "rank 0") and line in lines for name, _, line in shown)
    assert caller.containers() == []
    assert json_files.read_metrics(run / "metrics.jsonl")[-1]["step"] == 2


def test_offline_run_reads_a_data_set_whose_cache_it_cannot_change(caller):
    source, hub = caller.home / "sums", caller.home / "hf"
    source.mkdir()
    rows = [{"messages": RIGHT}] * 8
    (source / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    datasets.load_dataset(str(source), cache_dir=str(hub / "datasets"))
    (hub / "datasets/sums").rename(hub / "datasets/nobody___sums")  # as if from the Hub
    for file in [hub, *hub.rglob("*")]:
        os.chown(file, caller.uid, caller.uid)
    before = {file: file.lstat().st_mtime_ns for file in (hub / "datasets").rglob("*")}
    data = ["data=hub", "data.hub_id=nobody/sums", f"data.revision={'0' * 40}"]
    done = caller.run(
        *SMOKE, "hardware=cpu", "model=tiny", *data, HF_HUB_OFFLINE="1", HF_HOME=str(hub)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file: file.lstat().st_mtime_ns for file in (hub / "datasets").rglob("*")} == before


def test_confined_container_saves_on_signal_and_resumes(caller):
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
        homes = caller.cache / "rocm-recipes/home/cpu"
        assert homes in writable
        is_offline = os.environ.get("HF_HUB_OFFLINE") == "1"  # as in CI
        assert (caller.cache / "huggingface" in writable) is not is_offline
        code, home = caller.root / "x", f"{homes}/{images.load()['cpu'].tag}/x"
        assert container.exec_run(["touch", str(code)]).exit_code != 0, "the code is read-only"
        assert container.exec_run(["touch", home]).exit_code == 0
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
    """Send a signal to the launcher after a step, and return the step of the saved checkpoint."""
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
    """Create /dev/kfd, eight render nodes and the group `render`, like amdgpu."""
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


def test_container_has_only_the_chosen_gpu(caller, engine):
    if os.getuid() != 0:
        skip_without("only root can make device nodes")
    with device_nodes():
        # Add the new group.
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
        assert sorted(nodes.decode().split()) == ["/dev/dri/renderD133", "/dev/kfd"]
        assert {int(g) for g in groups} == {UID, *caller.identity["extra_groups"]} >= gpu_gids()
        assert can == 0, "the groups give access to the nodes"


SENTINELS = {
    "HF_TOKEN": "hf_sentinel_4f1c",
    # If it were not a secret, it would be passed like other NCCL variables.
    "NCCL_MY_KEY": "nccl_sentinel_03d7",
    "WANDB_API_KEY": "wandb_sentinel_9b2e",
    "HTTPS_PROXY": "http://user:proxy_sentinel_77aa@127.0.0.1:9",
    "MY_KEY": "my_sentinel_51d0",
}


def test_secrets_reach_only_the_processes(caller, engine, cpu_image):
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
        engine_files = b""
        if os.getuid() == 0:
            files = Path("/var/lib/docker/containers", container.id).glob("*")
            engine_files = b"".join(path.read_bytes() for path in files if path.is_file())
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
        "the engine's files of the container": engine_files,
        "the launcher's output": output.encode(),
        "run directory, caches and home": b"".join(path.read_bytes() for path in files),
        "image history": json.dumps(image.history()).encode(),
        "docker inspect of the image": json.dumps(image.attrs).encode(),
        "the plan": caller.run(*overrides, "mode=plan", "format=json", **SENTINELS).stdout.encode(),
    }
    for place, content in searched.items():
        leaked = [name for name, value in SENTINELS.items() if value.encode() in content]
        assert leaked == [], f"{place} contains {leaked}"
    assert run / "record.json" in files
    record = json.loads((run / "record.json").read_text())
    assert set(SENTINELS) <= set(record["secrets"])  # only the names
    assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*")), "removed after the run"


def trains(containers: list[docker.models.containers.Container]) -> bool:
    run_dirs = [Path(container.labels[f"{LABEL}.run"]) for container in containers]
    return any((run_dir / "metrics.jsonl").exists() for run_dir in run_dirs)


def test_next_start_removes_leftovers_of_killed_launcher(caller, engine, cpu_image):
    """Kill launchers at two times, and check that containers of others stay."""
    labels = {f"{LABEL}.run": str(caller.home), f"{LABEL}.process": "trainers"}
    foreign = [  # with another name, and with another uid
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
        for is_time in (bool, trains):  # when the container exists, and during training
            with caller.starting(*LONG, "resume=never", **SENTINELS) as launcher:
                wait_until(
                    lambda: is_time([c for c in caller.containers() if c.id not in known]),  # noqa: B023
                    launcher,
                )
                launcher.kill()
            left = {container.id for container in caller.containers()} - known
            assert left, "the launcher was killed while its container existed"
            known |= left
        run_with_closed_stderr(caller)
        assert {c.id for c in caller.containers()} == {foreign[0].id}
        assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*"))
        for container in foreign:
            container.reload()
            assert (container.status, container.attrs["RestartCount"]) == ("running", 0)
    finally:
        for container in [*foreign, *caller.containers()]:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)


def run_with_closed_stderr(caller: Caller) -> None:
    """Close stderr like `2>&1 | head`, and check that the run continues."""
    with caller.starting(*SMOKE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
        while not launcher.stderr.readline().startswith("trainers | "):
            assert launcher.poll() is None
        launcher.stderr.close()
        assert launcher.wait(timeout=PATIENCE_S) == 0
    run = caller.newest_run()
    assert json.loads((run / "record.json").read_text())["status"] == "done"
    assert "done: 2 steps" in (run / "logs/trainers.log").read_text()


def test_killed_for_memory(caller):
    done = caller.run(*SMOKE, "runtime.memory_gb=0.3", "preflight=warn")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "killed because it exceeded its limit of 0.3 GB (runtime.memory_gb)" in done.stdout
    assert caller.containers() == []


def test_container_removed_during_run(caller):
    with caller.running(*LONG) as launcher:
        caller.container(launcher).remove(force=True)
        output = launcher.communicate(timeout=PATIENCE_S)[0]
        assert launcher.returncode == 4
        assert "trainers failed" in output


def test_missing_socket_permission_and_missing_image(caller):
    done = caller.run("hardware=mi300x", "model=qwen3_4b", "container=rocm", "smoke=true")
    assert done.returncode == 3
    assert "containers/build.py image=rocm" in done.stderr
    if os.getuid() == 0:
        caller.identity["extra_groups"] = []
        done = caller.run(*SMOKE)
        assert done.returncode == 3
        assert "usermod -aG docker" in done.stderr
        assert "Traceback" not in done.stderr


def test_pull_custom_image_by_digest(caller, engine, base):
    """Use the base as custom image. It is pulled, but the program fails without our packages."""
    engine.images.remove(base)
    done = caller.run(
        "container=custom", f"container.reference={base}", "smoke=true", "hardware=cpu"
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "No module named" in done.stdout
    record = json.loads((caller.newest_run() / "record.json").read_text())
    # repo_digests may also have digests of other registries.
    assert base in record["image"]["repo_digests"]
    assert record["image"]["verified"] is True
