"""Test what is said if an engine, a device, an image or a port is missing.

The engine here answers over a unix socket as dockerd does; tests/integration has the real one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from containers import images
from launch.core.errors import HostError
from launch.execution import engine, secret_files
from launch.inputs.paths import secret_dir
from launch.plan import rundir
from launch.plan.container import container_name
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with

RUN = Path("/runs/engine/1")


class Handler(BaseHTTPRequestHandler):
    """Routes are (method, pattern of the path without its version) -> (status, body)."""

    def answer(self) -> None:
        path = re.sub(r"^/v[\d.]+", "", self.path)
        for (method, pattern), answer in self.server.routes.items():
            if method == self.command and re.fullmatch(pattern, path):
                status, body = answer
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                break
        else:
            status, content = (
                404,
                json.dumps({"message": f"no route {self.command} {path}"}).encode(),
            )
        self.server.asked.append(f"{self.command} {path}")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_HEAD = answer

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_args) -> None:
        """Quiet."""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(routes)` answers at DOCKER_HOST; returns the list of what was asked."""
    servers = []

    def start(routes):
        path = tmp_path / f"engine{len(servers)}.sock"
        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        server.daemon_threads = True
        server.routes = {
            ("GET", "/_ping"): (200, b"OK"),
            ("GET", "/version"): (200, {"ApiVersion": "1.41"}),
            ("GET", "/info"): (200, {"DockerRootDir": str(tmp_path)}),
            ("GET", "/containers/json.*"): (200, []),
            **routes,
            ("GET", "/images/.*/json"): routes.get(
                ("GET", "/images/.*/json"), (404, {"message": "No such image"})
            ),
        }
        server.asked = []
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        servers.append(server)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        return server.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def plan_of(*overrides: str, host=None):
    config, _ = prepare(composed(*overrides))
    return make_plan(config, host or host_with(8), RUN)


def image_json(name: str, **changes):
    image = images.load()[name]
    labels = {"image": name, "tag": image.tag, "gfx": ",".join(image.gfx)} | changes.pop(
        "labels", {}
    )
    base = {
        "org.opencontainers.image.base.digest": changes.pop("base_digest", image.digest),
        "org.opencontainers.image.base.name": image.base,
    }
    return {
        "Id": "sha256:1",
        "RepoDigests": [],
        "Config": {"Labels": base | {f"io.rocm-recipes.{k}": v for k, v in labels.items()}},
    } | changes


def test_no_engine(tmp_path, monkeypatch, launch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    done = launch("hardware=cpu", "container=cpu", "smoke=true")
    assert done.code == 3
    assert f"No docker engine answers at unix://{tmp_path}/none.sock" in done.err
    assert "runtime=local" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_hangs_up_is_no_engine(fake, launch):
    fake({("GET", "/_ping"): (500, {"message": "broken"})})
    assert "No docker engine answers" in launch("hardware=cpu", "container=cpu", "smoke=true").err


def test_missing_devices():
    host = host_with(8)
    plan = plan_of("hardware=mi300x", "topology=ddp", host=host)
    with pytest.raises(HostError, match="/dev/kfd missing.*modprobe amdgpu"):
        engine.check_devices(plan, dataclasses.replace(host, device_nodes={}))
    with pytest.raises(
        HostError, match=r"/dev/dri/renderD135 missing.*Here: /dev/kfd, /dev/dri/renderD128"
    ):
        engine.check_devices(
            plan,
            dataclasses.replace(
                host,
                device_nodes={
                    n: g for n, g in host.device_nodes.items() if n != "/dev/dri/renderD135"
                },
            ),
        )
    engine.check_devices(plan, host)


def test_not_in_the_group_of_the_nodes():
    host = host_with(8)
    plan = plan_of("hardware=mi300x", "topology=ddp", host=host)
    with pytest.raises(
        HostError,
        match=(
            r"not in render, and only its members open /dev/dri/renderD128: sudo usermod -aG "
            r"render"
        ),
    ):
        engine.check_devices(plan, dataclasses.replace(host, member_of=(1000, 44)))
    with pytest.raises(
        HostError, match="not in 109"
    ):  # a group without a name here, as from a directory service
        engine.check_devices(plan, dataclasses.replace(host, member_of=(1000,), gids={}))
    engine.check_devices(plan, dataclasses.replace(host, member_of=(1000, 109)))
    engine.check_devices(plan, dataclasses.replace(host, uid=0, member_of=(0,)))
    engine.check_devices(
        plan, dataclasses.replace(host, member_of=(), device_nodes=dict.fromkeys(host.device_nodes))
    )


def test_image_not_built(fake):
    fake({})
    with pytest.raises(
        HostError, match=r"container=cpu: rocm-recipes/cpu:\w+ is not built.*build.py image=cpu"
    ):
        engine.check(plan_of("hardware=cpu", "container=cpu"), host_with(0))


CUSTOM = ["hardware=cpu", "container=custom", "container.reference=127.0.0.1:1/me/mine:1"]


def test_image_that_cannot_be_pulled(fake):
    asked = fake(
        {("POST", "/images/create.*"): (200, {"error": "manifest unknown"})}
    )  # inside an answer that began well
    with pytest.raises(
        HostError,
        match=(
            r"container=custom: .*127.0.0.1:1/me/mine:1 is not here and cannot be pulled: "
            r"manifest unknown"
        ),
    ):
        engine.check(plan_of(*CUSTOM), host_with(0))
    assert any("fromImage=127.0.0.1%3A1%2Fme%2Fmine" in line and "tag=1" in line for line in asked)
    fake({("POST", "/images/create.*"): (500, {"message": "connection refused"})})
    with pytest.raises(HostError, match="connection refused"):
        engine.check(plan_of(*CUSTOM), host_with(0))


def pushed(name: str, monkeypatch, **changes):
    """Return the lock with this image pushed."""
    tag, digest = images.load()[name].tag, f"sha256:{'b' * 64}"
    entries = images.load() | {
        name: dataclasses.replace(
            images.load()[name], pushed=f"127.0.0.1:1/{name}:{tag}@{digest}", **changes
        )
    }
    monkeypatch.setattr(images, "load", lambda: entries)
    return f"127.0.0.1:1/{name}@{digest}"


def test_disk_too_small(fake, monkeypatch):
    pushed("cpu", monkeypatch, size_gb=1e6)
    fake({})
    with pytest.raises(
        HostError, match=r"container=cpu: .*takes at least 1e\+06 GB.*docker system df"
    ):
        engine.check(plan_of("hardware=cpu", "container=cpu"), host_with(0))


def test_digest_differs_from_the_lock(fake, monkeypatch):
    reference = pushed("cpu", monkeypatch)
    fake(
        {
            ("GET", "/images/.*/json"): (
                200,
                image_json("cpu", RepoDigests=[f"127.0.0.1:1/cpu@sha256:{'c' * 64}"]),
            )
        }
    )
    plan = plan_of("hardware=cpu", "container=cpu")
    with pytest.raises(HostError, match=r"has the digests .*c{64}.*the lock .*b{64}"):
        engine.check(plan, host_with(0))
    fake({("GET", "/images/.*/json"): (200, image_json("cpu", RepoDigests=[reference]))})
    assert engine.check(plan, host_with(0))["repo_digests"] == [reference]


def test_an_image_of_other_inputs_or_another_base(fake):
    fake({("GET", "/images/.*/json"): (200, image_json("cpu", labels={"tag": "older"}))})
    with pytest.raises(HostError, match=r"built from other inputs \(cpu:older\)"):
        engine.check(plan_of("hardware=cpu", "container=cpu"), host_with(0))
    fake({("GET", "/images/.*/json"): (200, image_json("rocm", base_digest="sha256:other"))})
    with pytest.raises(
        HostError,
        match=r"built on docker.io/vllm/.* \(sha256:other\), and the lock names sha256:749f",
    ):
        engine.check(plan_of("hardware=mi300x", "topology=ddp"), host_with(8))


def test_image_without_code_for_the_gpu(fake):
    routes = {("GET", "/images/.*/json"): (200, image_json("rocm", labels={"gfx": "gfx90a"}))}
    fake(routes)
    with pytest.raises(HostError, match="no code for gfx942, only for gfx90a"):
        engine.check(plan_of("hardware=mi300x", "topology=ddp"), host_with(8))
    assert (
        engine.check(plan_of("hardware=mi300x", "container=rocm", "smoke=true"), host_with(8))["id"]
        == "sha256:1"
    )


def test_a_container_that_the_engine_refuses(fake):
    fake({("POST", "/containers/create.*"): (400, {"message": "invalid mount config"})})
    (spec,) = plan_of("hardware=cpu", "container=cpu").containers.values()
    with pytest.raises(HostError, match="the docker engine refuses: invalid mount config"):
        engine.create(engine.connect(), spec, "sha256:1", host_with(0))


def listed(name: str, run: Path, uid: int = 1000, status: str = "exited"):
    labels = {
        "io.rocm-recipes.run": str(run),
        "io.rocm-recipes.uid": str(uid),
        "io.rocm-recipes.process": "trainers",
    }
    return {
        "Id": name,
        "Name": f"/{name}",
        "Config": {"Labels": labels},
        "State": {"Status": status},
        "Image": "sha256:1",
    }


def test_only_ours_are_removed(fake, tmp_path):
    """An image made of a container inherits its labels, so the name has to match them."""
    ours = container_name(tmp_path, "trainers")
    every = {name: listed(name, tmp_path) for name in (ours, "theirs")}
    routes = {
        ("GET", f"/containers/{name}/json"): (200, content) for name, content in every.items()
    }
    routes |= {
        ("GET", "/containers/json.*"): (200, [{"Id": name} for name in every]),
        ("DELETE", "/containers/.*"): (204, b""),
    }
    asked = fake(routes)
    assert engine.remove_orphans(engine.connect(), host_with(0)) == [ours]
    assert [line for line in asked if line.startswith("DELETE")] == [
        f"DELETE /containers/{ours}?v=False&link=False&force=True"
    ]
    with rundir.locked(tmp_path):
        assert engine.remove_orphans(engine.connect(), host_with(0)) == [], "its launcher lives"


def test_a_container_that_cannot_be_removed_keeps_nobody_from_starting(fake, tmp_path, capsys):
    name = container_name(tmp_path, "trainers")
    fake(
        {
            ("GET", f"/containers/{name}/json"): (200, listed(name, tmp_path)),
            ("GET", "/containers/json.*"): (200, [{"Id": name}]),
            ("DELETE", "/containers/.*"): (500, {"message": "did not receive an exit event"}),
        }
    )
    assert engine.remove_orphans(engine.connect(), host_with(0)) == []
    assert f"{name} cannot be removed: did not receive an exit event" in capsys.readouterr().err


def test_a_name_that_somebody_else_took(fake):
    (spec,) = plan_of("hardware=cpu", "container=cpu").containers.values()
    theirs = {
        "Id": "1",
        "Name": f"/{spec.name}",
        "Config": {"Labels": {}},
        "State": {"Status": "running"},
    }
    conflict = (409, {"message": "Conflict. The container name is already in use"})
    routes = {("POST", "/containers/create.*"): conflict}
    asked = fake({("GET", "/containers/.*/json"): (200, theirs), **routes})
    with pytest.raises(HostError, match="the docker engine refuses: Conflict"):
        engine.create(engine.connect(), spec, "sha256:1", host_with(0))
    assert not [line for line in asked if line.startswith("DELETE")]


def test_an_engine_that_fails_in_the_middle(fake):
    fake({("GET", "/containers/json.*"): (500, {"message": "database is locked"})})
    with pytest.raises(HostError, match="the docker engine refuses: database is locked"):
        engine.check(plan_of("hardware=cpu", "container=cpu"), host_with(0))


def test_only_ours_are_looked_for(fake):
    asked = fake({})
    assert engine.remove_orphans(engine.connect(), host_with(0)) == []
    (line,) = [a for a in asked if "/containers/json" in a]
    assert "io.rocm-recipes.run" in line
    assert "io.rocm-recipes.uid%3D1000" in line


def test_secrets_are_private_files_for_as_long_as_the_run(tmp_path):
    host = host_with(0, XDG_RUNTIME_DIR=str(tmp_path), HF_TOKEN="hf_sentinel")
    host = dataclasses.replace(host, uid=tmp_path.stat().st_uid)
    folder = secret_dir(host, RUN)
    with secret_files.written(["HF_TOKEN"], host, RUN):
        assert (folder / "HF_TOKEN").read_text() == "hf_sentinel"
        assert (folder / "HF_TOKEN").stat().st_mode & 0o777 == 0o400
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_secrets_of_a_dead_launcher_are_removed_and_of_a_live_one_kept(tmp_path):
    host = dataclasses.replace(
        host_with(0, XDG_RUNTIME_DIR=str(tmp_path), HF_TOKEN="x"), uid=tmp_path.stat().st_uid
    )
    live, dead = tmp_path / "live", tmp_path / "dead"
    live.mkdir()
    dead.mkdir()
    killed = [secret_files.written(["HF_TOKEN"], host, run) for run in (live, dead)]
    for launcher in killed:
        launcher.__enter__()  # and it never exits
    half_made = secret_dir(host, live).parent / ("0" * 12)
    half_made.mkdir()
    with rundir.locked(live):
        secret_files.remove_orphans(host)
        assert secret_dir(host, live).exists()
        assert not secret_dir(host, dead).exists()
        assert half_made.exists(), "another launcher may be making it"


def test_a_link_in_the_place_of_the_secrets_is_never_followed(tmp_path):
    """A link in /dev/shm must not have somebody's files removed, or secrets written there."""
    host = dataclasses.replace(
        host_with(0, XDG_RUNTIME_DIR=str(tmp_path), HF_TOKEN="x"), uid=tmp_path.stat().st_uid
    )
    victim = tmp_path / "victim"
    precious = victim / ("a" * 12)
    precious.mkdir(parents=True)
    (precious / ".run").write_text("/nowhere")
    victim.chmod(0o700)
    (tmp_path / f"rocm-recipes-{host.uid}").symlink_to(victim)
    secret_files.remove_orphans(host)
    assert (precious / ".run").exists()
    with (
        pytest.raises(HostError, match="is not a directory that only you can open"),
        secret_files.written(["HF_TOKEN"], host, RUN),
    ):
        raise AssertionError("not reached")
    assert [p.name for p in victim.iterdir()] == ["a" * 12]


def test_secrets_where_they_cannot_be_written(tmp_path):
    host = dataclasses.replace(
        host_with(0, XDG_RUNTIME_DIR=str(tmp_path / "absent"), HF_TOKEN="x"),
        uid=tmp_path.stat().st_uid,
    )
    with (
        pytest.raises(FileNotFoundError),
        secret_files.written(["HF_TOKEN"], host, RUN),
    ):
        raise AssertionError("not reached")
    open_to_all = tmp_path / f"rocm-recipes-{host.uid}"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    host = dataclasses.replace(host, environ={"XDG_RUNTIME_DIR": str(tmp_path), "HF_TOKEN": "x"})
    with (
        pytest.raises(HostError, match="not a directory that only you can open"),
        secret_files.written(["HF_TOKEN"], host, RUN),
    ):
        raise AssertionError("not reached")
