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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest

from containers.images import LABEL
from launch.core import json_files
from tests.conftest import ROOT

pytestmark = pytest.mark.integration
UID = 12345  # unused: a user without a name, a home or a password
SMOKE = ["runtime=docker", "container=cpu", "smoke=true"]
LONG = [
    "hardware=cpu",
    "container=cpu",
    "model=tiny",
    "data.num_train=64",
    "method.args.max_steps=100000",
    "method.args.logging_steps=1",
]
PATIENCE_S = 480  # after which a test gives up on an event that never comes


class Caller:
    """Be a user who may use the docker socket and is not root."""

    def __init__(self, home: Path, cache: Path, engine: docker.DockerClient) -> None:
        self.home, self.cache, self.engine = home, cache, engine
        self.uid = UID if os.getuid() == 0 else os.getuid()
        self.identity: dict[str, object] = {}
        if os.getuid() == 0:
            groups = sorted({Path("/var/run/docker.sock").stat().st_gid, *_gpu_gids()})
            self.identity = {"user": UID, "group": UID, "extra_groups": groups}
            for folder in (home, cache):
                os.chown(folder, UID, UID)
        self.root = ROOT if self.can("-r", ROOT / "README.md") else self.bind_mounted()
        self.python = self.launcher_python()
        keep = {k: v for k, v in os.environ.items() if k not in ("XDG_RUNTIME_DIR", "HF_HOME")}
        self.env = {
            **keep,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(cache),
            "COLUMNS": "200",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        site = next(path for path in sys.path if path.endswith("site-packages"))
        self.env["PYTHONPATH"] = site.replace(str(ROOT), str(self.root))

    def can(self, test: str, path: Path) -> bool:
        return subprocess.run(["/usr/bin/test", test, str(path)], **self.identity).returncode == 0

    def bind_mounted(self) -> Path:
        """Mount the repository where the user can read it, even if its own folder is closed."""
        root = self.home.with_name(f"{self.home.name}-repository")
        root.mkdir()
        subprocess.run(["mount", "--bind", str(ROOT), str(root)], check=True)
        return root

    def launcher_python(self) -> str:
        """Return a Python of this version that the user may run.

        The environment's own may be in root's home.
        """
        version = "python{}.{}".format(*sys.version_info[:2])
        found = [
            str(self.root / ".venv/bin/python"),
            shutil.which(version, path="/usr/bin:/usr/local/bin"),
        ]
        return next(
            (python for python in found if python and self.can("-x", Path(python))), None
        ) or pytest.fail(f"no {version} for the caller")

    def leave(self) -> None:
        if self.root != ROOT:
            subprocess.run(["umount", str(self.root)], check=True)
            self.root.rmdir()
        shutil.rmtree(self.home, ignore_errors=True)

    def argv(self, *overrides: str) -> list[str]:
        return [self.python, str(self.root / "launch/run.py"), *overrides]

    def run(self, *overrides: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.argv(*overrides),
            cwd=self.home,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            **self.identity,
        )

    @contextmanager
    def running(self, *overrides: str, **env: str) -> Iterator[subprocess.Popen]:
        """Start a launcher in the background; kill it and remove its container afterwards."""
        process = subprocess.Popen(
            self.argv(*overrides),
            cwd=self.home,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **self.identity,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            for container in self.containers():
                container.remove(force=True)

    def containers(self) -> list[docker.models.containers.Container]:
        """Return our containers in any state."""
        return self.engine.containers.list(
            all=True,
            filters={"label": [f"{LABEL}.run", f"{LABEL}.uid={self.uid}"]},
            ignore_removed=True,
        )

    def container(self, process: subprocess.Popen) -> docker.models.containers.Container:
        """Return the container of a launcher in the background once it runs."""
        return until(
            lambda: next((c for c in self.containers() if c.status == "running"), None), process
        )

    def newest_run(self) -> Path:
        return max(
            (p.parent for p in self.home.glob("runs/*/*/record.json")),
            key=lambda p: p.stat().st_mtime_ns,
        )


def is_past(run: Path, step: int) -> bool:
    return any(row["step"] > step for row in json_files.read_metrics(run / "metrics.jsonl"))


def until(there, process: subprocess.Popen):
    """Return what `there` returns once it returns something.

    Fails with the launcher's output if that ends, or after PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = there()
        if found:
            return found
        if process.poll() is not None:
            pytest.fail(
                f"the launcher ended first, with {process.returncode}:\n{process.stdout.read()}"
            )
        time.sleep(0.05)
    process.kill()
    return pytest.fail(f"nothing came:\n{process.communicate()[0]}")


def _gpu_gids() -> set[int]:
    return {
        int(row.split(":")[2])
        for row in Path("/etc/group").read_text().splitlines()
        if row.split(":")[0] in ("video", "render")
    }


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


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=sft", "runtime.network=none"],
        ["method=dpo", "runtime.network=host", "hardware=mi300x", "topology=fsdp"],
        ["method=evaluate"],
        ["method=grpo", "hardware=mi300x", "model=qwen3_4b", "topology=split"],
    ],
    ids=lambda o: "-".join(o),
)
def test_smoke_run_trains_inside(caller, overrides):
    done = caller.run(*SMOKE, *overrides)
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
    log = (run / "logs").glob("*.log")
    lines = [line for file in log for line in file.read_text().splitlines()]
    assert lines
    prefix = {"evaluator | ", "trainers | ", "rank 0 | "}
    assert any(
        line.startswith(tuple(prefix)) and line.split(" | ", 1)[1] in lines
        for line in done.stderr.splitlines()
    )
    assert caller.containers() == []
    if "method=evaluate" not in overrides:
        assert json_files.read_metrics(run / "metrics.jsonl")[-1]["step"] == 2


def test_container_is_given_what_the_plan_says(caller):
    plan = json.loads(caller.run(*LONG, "mode=plan", "format=json").stdout)
    with caller.running(*LONG) as launcher:
        container = caller.container(launcher)
        given = container.attrs["HostConfig"]
        planned = plan["processes"][0]["container"]
        assert (
            container.attrs["Config"]["User"]
            == planned["user"]
            == f"{caller.uid}:{caller.uid if os.getuid() == 0 else os.getgid()}"
        )
        assert given["Privileged"] is False
        assert given["CapDrop"] == ["ALL"]
        assert not given["Devices"]
        assert given["ShmSize"] == 16_000_000_000
        writable = {m["Source"] for m in container.attrs["Mounts"] if m["RW"]}
        assert {Path(p).parent for p in writable} >= {
            caller.cache / "rocm-recipes/home",
            caller.cache,
        }
        assert not any("docker.sock" in m["Source"] for m in container.attrs["Mounts"])
        assert container.exec_run(["touch", str(caller.root / "x")]).exit_code != 0, (
            "the code is read-only"
        )
        assert (
            container.exec_run(["touch", f"{caller.cache}/rocm-recipes/home/cpu/x"]).exit_code == 0
        )


def test_signals_save_and_the_run_resumes(caller):
    saved, step = None, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with caller.running(*LONG) as launcher:
            run = Path(caller.container(launcher).labels[f"{LABEL}.run"])
            until(functools.partial(is_past, run, step), launcher)
            assert (
                saved is None or f"resuming from {saved}" in (run / "logs/trainers.log").read_text()
            )
            launcher.send_signal(number)
            said = launcher.communicate(timeout=PATIENCE_S)[0]
            assert launcher.returncode == 75, said
        assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
        before, step = (
            step,
            max(
                int(path.name.rsplit("-", 1)[1])
                for path in (run / "checkpoints").glob("checkpoint-*")
            ),
        )
        assert step > before
        saved = run / f"checkpoints/checkpoint-{step}"
        assert caller.containers() == []


@contextmanager
def made_nodes() -> Iterator[None]:
    """Make /dev/kfd and eight render nodes as amdgpu does, and the group `render`, as root.

    They are removed afterwards.
    """
    made: list[Path] = []
    group = subprocess.run(["getent", "group", "render"], capture_output=True).returncode != 0
    if group:
        subprocess.run(["groupadd", "--system", "render"], check=True)
    gid = int(
        subprocess.run(
            ["getent", "group", "render"], check=True, capture_output=True, text=True
        ).stdout.split(":")[2]
    )
    folder = Path("/dev/dri").exists()
    Path("/dev/dri").mkdir(exist_ok=True)
    try:
        for path, major, minor in [
            ("/dev/kfd", 511, 0),
            *((f"/dev/dri/renderD{n}", 226, n) for n in range(128, 136)),
        ]:
            if not Path(path).exists():
                subprocess.run(["mknod", path, "c", str(major), str(minor)], check=True)
                made.append(Path(path))
                os.chown(path, 0, gid)
                Path(path).chmod(0o660)
        yield
    finally:
        for path in made:
            path.unlink()
        if not folder:
            Path("/dev/dri").rmdir()
        if group:
            subprocess.run(["groupdel", "render"], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="device nodes are made by root only")
def test_only_the_chosen_gpu_is_inside(caller, engine):
    with made_nodes():
        # One of these groups has just been made.
        caller.identity["extra_groups"] = [*caller.identity["extra_groups"], *_gpu_gids()]
        long = ["hardware=mi300x", "model=qwen3_4b", *SMOKE]
        with caller.running(*long, HIP_VISIBLE_DEVICES="5") as launcher:
            container = caller.container(launcher)
            nodes = container.exec_run(
                [
                    "find",
                    "/dev",
                    "-type",
                    "c",
                    "(",
                    "-name",
                    "kfd",
                    "-o",
                    "-path",
                    "/dev/dri/*",
                    ")",
                ]
            ).output
            groups = container.exec_run(["id", "-G"]).output.split()
            can = container.exec_run(
                ["sh", "-c", "test -r /dev/kfd && test -w /dev/kfd && test -w /dev/dri/renderD133"]
            ).exit_code
            launcher.communicate(timeout=PATIENCE_S)
            assert launcher.returncode == 0
        assert sorted(nodes.decode().split()) == ["/dev/dri/renderD133", "/dev/kfd"]
        assert {int(g) for g in groups} == {UID, *caller.identity["extra_groups"]} >= _gpu_gids()
        assert can == 0, "the groups open the nodes to a user who is not root"
        caller.identity["extra_groups"] = [Path("/var/run/docker.sock").stat().st_gid]
        refused = caller.run(*long)
        assert refused.returncode == 3
        assert "you are not in" in refused.stderr


SENTINELS = {
    "HF_TOKEN": "hf_sentinel_4f1c",
    # Would be passed as a variable of the stack if it were not listed.
    "NCCL_MY_KEY": "nccl_sentinel_03d7",
    "WANDB_API_KEY": "wandb_sentinel_9b2e",
    "HTTPS_PROXY": "http://user:proxy_sentinel_77aa@127.0.0.1:9",
    "MY_KEY": "my_sentinel_51d0",
}


def test_secrets_reach_the_processes_and_stand_nowhere(caller, engine, cpu_image):
    given = [
        *SMOKE,
        "runtime.secrets=[HF_TOKEN,WANDB_API_KEY,HTTPS_PROXY,MY_KEY,NCCL_MY_KEY]",
        "user_env.NO_PROXY='*'",
    ]
    with caller.running(*given, **SENTINELS) as launcher:
        container = caller.container(launcher)
        inspected = json.dumps(engine.api.inspect_container(container.id))
        code = (
            f"import os; print(sum(v in os.environ.values() for v in {list(SENTINELS.values())!r}))"
        )
        reached = container.exec_run(
            ["python3", str(caller.root / "containers/enter.py"), "python3", "-c", code]
        )
        modes = container.exec_run(["sh", "-c", "stat -c %a /run/secrets/*"]).output.split()
        engines_files = (
            [p for p in Path("/var/lib/docker/containers").glob(f"{container.id}/*") if p.is_file()]
            if os.getuid() == 0
            else []
        )
        engines_copy = b"".join(path.read_bytes() for path in engines_files)
        said = launcher.communicate(timeout=PATIENCE_S)[0]
        assert launcher.returncode == 0, said
    assert reached.output.strip() == str(len(SENTINELS)).encode()
    assert set(modes) == {b"400"}
    run = caller.newest_run()
    files = [
        path
        for folder in (caller.home, caller.cache)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    image = engine.images.get(cpu_image)
    searched = {
        "docker inspect of the container": inspected.encode(),
        "the engine's own files of the container": engines_copy,
        "the launcher's output": said.encode(),
        "run directory, caches and home of the caller": b"".join(
            path.read_bytes() for path in files
        ),
        "image history": json.dumps(image.history()).encode(),
        "docker inspect of the image": json.dumps(image.attrs).encode(),
        "the plan": caller.run(*given, "mode=plan", "format=json", **SENTINELS).stdout.encode(),
    }
    for place, content in searched.items():
        found = [name for name, value in SENTINELS.items() if value.encode() in content]
        assert found == [], f"{place} holds {found}"
        print(f"searched: {place}, {len(content)} bytes")
    assert run / "record.json" in files
    assert set(SENTINELS) <= set(json.loads((run / "record.json").read_text())["secrets"]), (
        "by name"
    )
    assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*")), (
        "the files are gone with the run"
    )


def trains(containers: list[docker.models.containers.Container]) -> bool:
    return any(
        (Path(found.labels[f"{LABEL}.run"]) / "metrics.jsonl").exists() for found in containers
    )


# When a launcher is killed: at once, in its imports, as its container is made or has started, and
# in training.
MOMENTS = {
    "at once": lambda containers: True,
    "its imports": lambda containers: time.sleep(1) or True,
    "a container": bool,
    "one that runs": lambda containers: any(found.status == "running" for found in containers),
    "training": trains,
}


def test_a_killed_launcher_leaves_nothing_after_the_next_start(caller, engine, cpu_image):
    """Kill it anywhere from its imports to the training; foreign containers stay."""
    labels = {f"{LABEL}.run": str(caller.home), f"{LABEL}.process": "trainers"}
    foreign = [
        engine.containers.run(
            cpu_image,
            ["sleep", "3600"],
            detach=True,
            labels=labels | {f"{LABEL}.uid": str(uid)},
            init=True,
        )
        for uid in (caller.uid, 1)  # another name, and another uid too
    ]
    caught = []
    try:
        for moment, has_come in MOMENTS.items():
            known = {container.id for container in caller.containers()}
            made = lambda known=known: [c for c in caller.containers() if c.id not in known]  # noqa: E731
            with subprocess.Popen(
                caller.argv(*LONG, "resume=never"),
                cwd=caller.home,
                env={**caller.env, **SENTINELS},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                **caller.identity,
            ) as launcher:
                until(lambda: has_come(made()), launcher)  # noqa: B023
                launcher.kill()
            caught += [moment] if made() else []
        done = caller.run(*SMOKE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {c.id for c in caller.containers()} == {foreign[0].id}
        assert not list(Path("/dev/shm").glob(f"rocm-recipes-{caller.uid}/*"))
        assert len(caught) >= 2, "some were killed while their container was there"
        print(f"killed {len(MOMENTS)} launchers, with a container: {', '.join(caught)}")
        for container in foreign:
            container.reload()
            assert (container.status, container.attrs["RestartCount"]) == ("running", 0)
    finally:
        for container in [*foreign, *caller.containers()]:
            with contextlib.suppress(docker.errors.NotFound):
                container.remove(force=True)


def test_a_terminal_that_goes_away_stops_nothing(caller):
    """Close the pipe like `2>&1 | head`: the run continues, and its log is whole."""
    with subprocess.Popen(
        caller.argv(*SMOKE),
        cwd=caller.home,
        env=caller.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **caller.identity,
    ) as launcher:
        launcher.stderr.readline()
        launcher.stderr.close()
        assert launcher.wait(timeout=PATIENCE_S) == 0
    run = caller.newest_run()
    assert json.loads((run / "record.json").read_text())["status"] == "done"
    assert "done: 2 steps" in (run / "logs/trainers.log").read_text()


def test_killed_for_memory(caller):
    done = caller.run(*SMOKE, "runtime.memory_gb=0.3")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "killed for memory: it outgrew its limit of 0.3 GB (runtime.memory_gb)" in done.stdout
    assert caller.containers() == []


def test_container_removed_by_somebody_else(caller):
    with caller.running(*LONG) as launcher:
        caller.container(launcher).remove(force=True)
        said = launcher.communicate(timeout=PATIENCE_S)[0]
        assert launcher.returncode == 4
        assert "trainers failed" in said


def test_exit_code_of_a_rank_comes_through(caller):
    done = caller.run(*SMOKE, "method.args.debug=nonsense")
    assert done.returncode == 2
    assert "trainers failed: method.args: SFTConfig refuses them" in done.stdout
    assert caller.containers() == []


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


def test_an_image_of_ones_own_is_pulled_by_its_digest(caller, engine, registry, cpu_image, remove):
    repository = f"{registry}/mine"
    image = engine.images.get(cpu_image)
    image.tag(repository, "1")
    pushed = [json.loads(line) for line in engine.images.push(repository, tag="1").splitlines()]
    digest = next(event["aux"]["Digest"] for event in pushed if "aux" in event)
    remove.append(f"{repository}@{digest}")
    engine.images.remove(f"{repository}:1")
    done = caller.run(
        "container=custom",
        f"container.reference={repository}@{digest}",
        "smoke=true",
        "hardware=cpu",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((caller.newest_run() / "record.json").read_text())
    # The engine keeps digests of other registries too.
    assert f"{repository}@{digest}" in record["image"]["repo_digests"]
    assert record["image"]["verified"] is True
