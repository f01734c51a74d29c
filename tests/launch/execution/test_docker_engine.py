"""Test runtime=docker with a missing or wrong engine, device or image; test secrets.

The engine here answers over a unix socket as dockerd does; tests/integration has the real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from containers import build, images
from containers import engine as images_engine
from launch.core import docker_host
from launch.core.errors import HostError
from launch.execution import docker_engine, secret_files
from launch.execution.mounted import link_data
from launch.inputs.paths import secret_dir
from launch.plan import rundir
from launch.plan.container import container_name
from launch.plan.planning import make_plan, prepare
from tests.conftest import composed, host_with

CPU = ["hardware=cpu", "container=cpu"]
RUN = Path("/runs/engine/1")
MISSING = b'["rocprofv3"]\n'  # output of containers/tools.py


class Handler(BaseHTTPRequestHandler):
    """An engine whose routes map (method, path pattern without version) to (status, body)."""

    def answer(self) -> None:
        path = re.sub(r"^/v[\d.]+", "", self.path)
        status, body = 404, {"message": f"no route {self.command} {path}"}
        for (method, pattern), answer in self.server.routes.items():
            if method == self.command and re.fullmatch(pattern, path):
                status, body = answer
                break
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.server.asked.append(f"{self.command} {path}")
        self.server.sent.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *_args) -> None:
        """Log nothing."""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return fake(routes): start an engine at DOCKER_HOST and return the list of its requests.

    `fake.sent` has the bodies of the requests.
    """
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
            ("GET", "/images/.*/json"): (404, {"message": "No such image"}),
            **routes,
        }
        server.asked, server.sent = [], []
        start.sent = server.sent
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
    probe = json.dumps({"torch": image.torch, "gfx": " ".join(["gfx900", *image.gfx])})
    labels = {"image": name, "tag": image.tag, "gfx": ",".join(image.gfx), "probe": probe}
    labels |= changes
    labels = {f"io.rocm-recipes.{key}": value for key, value in labels.items()}
    return {"Id": "sha256:1", "RepoDigests": [], "Config": {"Labels": labels}}


def test_without_an_engine_the_run_exits_with_3(fake, tmp_path, monkeypatch, launch):
    run = ("hardware=cpu", "container=cpu", "smoke=true")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    done = launch(*run)
    assert done.code == 3
    assert f"unix://{tmp_path}/none.sock" in done.err
    assert "runtime=local" in done.err
    assert not (tmp_path / "runs").exists()
    fake({("GET", "/_ping"): (500, {"message": "broken"})})
    assert launch(*run).code == 3


def test_without_an_engine_and_without_kfd_the_doctor_has_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    host = host_with(8)
    host = dataclasses.replace(host, device_nodes={n: 109 for n in host.device_nodes if "dri" in n})
    with pytest.raises(HostError, match=r"answers at .*\n.*/dev/kfd"):
        docker_engine.check(plan_of("hardware=mi300x", "topology=ddp"), host)


def test_a_missing_image_has_to_be_built(fake):
    fake({})
    with pytest.raises(HostError, match="container=cpu: .*build.py image=cpu"):
        docker_engine.check(plan_of(*CPU), host_with(0))


@pytest.mark.parametrize(("address", "message"), [
    ("ssh://me@localhost", "DOCKER_HOST=ssh://me@localhost: "),
    ("tcp://192.0.2.1:2375", "DOCKER_HOST=tcp://192.0.2.1:2375: "),  # reserved for documentation
    ("192.0.2.1", "DOCKER_HOST=192.0.2.1: "),
    ("tcp://[::1:2375", "DOCKER_HOST=tcp://[::1:2375: not the address"),
    ("tcp://localhost:99999", "DOCKER_HOST=tcp://localhost:99999: not the address"),
    ("/no/such.sock", "DOCKER_HOST=/no/such.sock: not the address of an engine. Use: "
     "DOCKER_HOST=unix:///no/such.sock."),
    ("unix:/no/such.sock", "No docker engine answers"),
    ("tcp://:1", "No docker engine answers"),
    ("tcp://[::1]:1", "No docker engine answers"),
    ("tcp://localhost:1", "No docker engine answers"),
    (f"tcp://{socket.gethostname()}:1", "No docker engine answers"),
])  # fmt: skip
def test_an_engine_of_another_machine_is_rejected(monkeypatch, address, message):
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(HostError, match=f"^{re.escape(message)}"):
        docker_engine.check(plan_of(*CPU), host_with(0))


def test_a_build_needs_no_files_of_this_machine(monkeypatch):
    assert docker_host.problem("tcp://192.0.2.1:2375", is_build=True) is None
    for address in ("ssh://me@localhost", "tcp://[::1:2375"):
        monkeypatch.setenv("DOCKER_HOST", address)
        with pytest.raises(HostError, match=f"^DOCKER_HOST={re.escape(address)}: ") as raised:
            images_engine.connect()
        assert "runtime=" not in str(raised.value)


@pytest.mark.parametrize("is_here", [True, False])
def test_the_folder_of_an_engine_on_another_machine_is_unknown(fake, tmp_path, is_here):
    root = str(tmp_path / ("." if is_here else "other_machine"))
    fake({("GET", "/info"): (200, {"DockerRootDir": root})})
    folder = docker_host.folder(docker_host.address(os.environ))
    assert folder == (root if is_here else None)


def test_a_build_pulls_no_base_that_the_disk_is_too_small_for(fake):
    asked = fake({("GET", "/images/json.*"): (200, [])})
    image = dataclasses.replace(images.load()["cpu"], download_gb="1e6")
    with pytest.raises(HostError):
        build.make(images_engine.connect(), image, image.base, "sdk", print)
    assert f"GET /images/{image.base}/json" in asked
    assert not [request for request in asked if request.startswith("POST")]


@pytest.mark.parametrize("answer", [
    (200, {"error": "manifest unknown"}),  # an error in the middle of an answer
    (500, {"message": "connection refused"}),
])  # fmt: skip
def test_a_pull_that_fails_is_explained(fake, answer):
    asked = fake({("POST", "/images/create.*"): answer})
    custom = ["hardware=cpu", "container=custom", "container.reference=127.0.0.1:1/me/mine:1"]
    with pytest.raises(HostError, match=f"container=custom: .*{next(iter(answer[1].values()))}"):
        docker_engine.check(plan_of(*custom), host_with(0))
    assert any("fromImage=127.0.0.1%3A1%2Fme%2Fmine" in line and "tag=1" in line for line in asked)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("cpu", {"tag": "older"}, "cpu:older"),
    ("rocm", {"gfx": "gfx90a"}, "gfx942.*gfx90a"),
], ids=["other inputs", "no code for the GPU"])  # fmt: skip
def test_a_wrong_image_is_rejected(fake, name, changes, message):
    fake({("GET", "/images/.*/json"): (200, image_json(name, **changes))})
    plan = plan_of(*(CPU if name == "cpu" else ["hardware=mi300x", "topology=ddp"]))
    with pytest.raises(HostError, match=message):
        docker_engine.check(plan, host_with(8))


def test_an_image_for_several_gpus_is_accepted(fake):
    fake({("GET", "/images/.*/json"): (200, image_json("rocm"))})
    plan = plan_of("hardware=mi300x", "topology=ddp")
    labels = docker_engine.check(plan, host_with(8))["labels"]
    assert (labels["gfx"], labels["torch"]) == ("gfx90a,gfx942,gfx950", images.load()["rocm"].torch)


@pytest.mark.parametrize(("name_is_taken", "message", "match"), [
    (False, "invalid mount config", "invalid mount config"),
    (True, "invalid mount config", "invalid mount config"),
    (False, "container-init binary not found on the host: stat /x", "catatonit"),  # podman
])  # fmt: skip
def test_an_error_of_the_engine_is_explained(fake, name_is_taken, message, match):
    (spec,) = plan_of(*CPU).containers.values()
    routes = {("POST", "/containers/create.*"): (400, {"message": message})}
    if name_is_taken:  # by a container that is not ours
        theirs = {"Id": "1", "Name": f"/{spec.name}", "Config": {"Labels": {}}}
        routes[("GET", "/containers/.*/json")] = (200, theirs)
    asked = fake(routes)
    with pytest.raises(HostError, match=match):
        docker_engine.create(docker_engine.connect(), spec, "sha256:1", host_with(0))
    assert not [line for line in asked if line.startswith("DELETE")]


ALL, OF_A_CONTAINER = "CapBnd:\t000001ffffffffff", "CapBnd:\t00000000a80425fb"  # docker's default
ROOTLESS = ["name=rootless"]


@pytest.mark.parametrize(("options", "status", "memlock", "limits", "is_warned"), [
    ([], f"Name:\tpython\n{ALL}\n", 8 << 20, {}, False),
    ([], "", 8 << 20, {}, False),  # a system without /proc
    ([], OF_A_CONTAINER, 8 << 20, {"nofile": 512, "stack": -1}, False),
    (ROOTLESS, ALL, 8 << 20, {"memlock": 8 << 20, "nofile": 512, "stack": -1}, True),
    (ROOTLESS, ALL, -1, {"memlock": -1, "nofile": 512, "stack": -1}, False),
])  # fmt: skip
def test_limits_of_containers_are_at_most_those_that_the_engine_may_set(
    fake, monkeypatch, tmp_path, capsys, options, status, memlock, limits, is_warned
):
    monkeypatch.setattr(docker_engine, "STATUS", tmp_path / "status")
    docker_engine.STATUS.write_text(status)
    fake({("GET", "/info"): (200, {"SecurityOptions": options})})
    hard = {"MEMLOCK": memlock, "NOFILE": 512, "STACK": -1}
    numbers = {getattr(resource, f"RLIMIT_{name}"): (0, value) for name, value in hard.items()}
    monkeypatch.setattr(resource, "getrlimit", numbers.__getitem__)
    (spec,) = plan_of("hardware=mi300x", "topology=single").containers.values()
    assert docker_engine.highest_limits(docker_engine.connect(), spec) == limits
    assert ("LimitMEMLOCK" in capsys.readouterr().err) == is_warned


def test_podman_gives_sandboxes_no_other_writable_folders(fake):
    fake({
        ("GET", "/info"): (200, {"BuildahVersion": "1.28.2"}),
        ("POST", "/containers/create.*"): (201, {"Id": "1", "Warnings": []}),
        ("GET", "/containers/1/json"): (200, listed("1", RUN)),
    })  # fmt: skip
    rewards = ["~method.rewards.reasoning_gym", "+method.rewards.code_tests=1.0"]
    spec = plan_of(*CPU, "method=grpo", "data=code", *rewards).containers["sandbox"]
    docker_engine.create(docker_engine.connect(), spec, "sha256:1", host_with(0))
    (body,) = (json.loads(sent) for sent in fake.sent if b"HostConfig" in sent)
    tmpfs = body["HostConfig"]["Tmpfs"]
    assert [path for path, options in tmpfs.items() if options != "ro"] == ["/tmp"]
    assert "nr_inodes" not in tmpfs["/tmp"]


DOCKER = {"SecurityOptions": ["name=seccomp"], "CgroupVersion": "1"}
OLD_PODMAN = {**DOCKER, "Rootless": True, "MemoryLimit": True}  # before 4.6


@pytest.mark.parametrize(("info", "rootless", "limits"), [
    (DOCKER, False, True),
    ({**DOCKER, "PidsLimit": False}, False, False),
    ({"SecurityOptions": ["name=rootless"], "CgroupVersion": "2"}, True, True),
    (OLD_PODMAN, True, False),  # whatever it claims
])  # fmt: skip
def test_settings_for_engines(fake, info, rootless, limits):
    fake({
        ("GET", "/info"): (200, info),
        ("POST", "/containers/create.*"): (201, {"Id": "1", "Warnings": []}),
        ("GET", "/containers/1/json"): (200, listed("1", RUN)),
    })  # fmt: skip
    plan = plan_of("hardware=mi300x", "topology=single", "runtime.memory_gb=100")
    (spec,) = plan.containers.values()
    client = docker_engine.connect()
    docker_engine.create(client, spec, "sha256:1", host_with(0))
    body = next(json.loads(sent) for sent in fake.sent if b"HostConfig" in sent)
    assert body["User"] == ("0:0" if rootless else f"{os.getuid()}:{os.getgid()}")
    assert bool(body["HostConfig"].get("GroupAdd")) != rootless
    assert ("run.oci.keep_original_groups" in body["HostConfig"].get("Annotations", {})) == rootless
    assert body["HostConfig"]["PidsLimit"] == 2**22
    if limits:
        docker_engine.check_limits(client, plan)
    else:
        with pytest.raises(HostError, match=r"^runtime\.memory_gb: "):
            docker_engine.check_limits(client, plan)


def listed(name: str, run: Path, process: str = "trainers"):
    labels = {"run": str(run), "uid": "1000", "process": process}
    labels = {f"io.rocm-recipes.{key}": value for key, value in labels.items()}
    config, state = {"Labels": labels}, {"Status": "exited"}
    return {"Id": name, "Name": f"/{name}", "Config": config, "State": state, "Image": "sha256:1"}


def test_only_our_orphans_are_removed(fake, tmp_path):
    """An image committed from a container inherits its labels, so the name must match too."""
    pause, ours = (container_name(tmp_path, process) for process in ("pause", "trainers"))
    contents = {name: listed(name, tmp_path) for name in (ours, "theirs")}
    contents = {pause: listed(pause, tmp_path, "pause"), **contents}
    rows = [
        {"Id": name, "Names": [f"/{name}"], "Labels": content["Config"]["Labels"]}
        for name, content in contents.items()
    ]
    routes = {("GET", f"/containers/{name}/json"): (200, c) for name, c in contents.items()}
    routes |= {
        ("GET", "/containers/json.*"): (200, rows),
        ("DELETE", "/containers/.*"): (204, b""),
    }
    asked = fake(routes)
    # The pause container is removed last.
    assert docker_engine.remove_orphans(docker_engine.connect(), host_with(0)) == [ours, pause]
    deletions = [line for line in asked if line.startswith("DELETE")]
    options = "?v=False&link=False&force=True"
    assert deletions == [f"DELETE /containers/{name}{options}" for name in (ours, pause)]
    (query,) = [line for line in asked if "/containers/json" in line]
    assert "io.rocm-recipes.uid%3D1000" in query
    with rundir.locked(tmp_path):  # its launcher is alive
        assert docker_engine.remove_orphans(docker_engine.connect(), host_with(0)) == []


def secrets_host(folder: Path):
    host = host_with(0, XDG_RUNTIME_DIR=str(folder), HF_TOKEN="hf_sentinel")
    return dataclasses.replace(host, uid=os.getuid())


def test_secrets_are_private_files_while_the_run_lasts(tmp_path):
    host = secrets_host(tmp_path)
    folder = secret_dir(host, RUN)
    with secret_files.written(["HF_TOKEN"], host, RUN):
        assert (folder / "HF_TOKEN").read_text() == "hf_sentinel"
        assert (folder / "HF_TOKEN").stat().st_mode & 0o777 == 0o400
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_secrets_of_dead_launchers_are_removed(tmp_path):
    host, live, dead = secrets_host(tmp_path), tmp_path / "live", tmp_path / "dead"
    for run in (live, dead):
        run.mkdir()
    launchers = [secret_files.written(["HF_TOKEN"], host, run) for run in (live, dead)]
    for launcher in launchers:
        launcher.__enter__()  # and never exits
    half_made = secret_dir(host, live).parent / ("0" * 12)
    half_made.mkdir()
    with rundir.locked(live):
        secret_files.remove_orphans(host)
        assert secret_dir(host, live).exists()
        assert not secret_dir(host, dead).exists()
        assert half_made.exists(), "another launcher may be creating it"


@pytest.mark.parametrize("is_link", [True, False])
def test_secrets_are_only_written_to_a_private_directory(tmp_path, is_link):
    """A link in /dev/shm must not redirect secrets or the removal of files."""
    host, victim = secrets_host(tmp_path), tmp_path / "victim"
    (victim / ("a" * 12)).mkdir(parents=True)
    (victim / ("a" * 12) / ".run").write_text("/nowhere")
    victim.chmod(0o700 if is_link else 0o755)
    folder = tmp_path / f"rocm-recipes-{host.uid}"
    folder.symlink_to(victim) if is_link else victim.rename(folder)
    secret_files.remove_orphans(host)
    with pytest.raises(HostError), secret_files.written(["HF_TOKEN"], host, RUN):
        raise AssertionError("not reached")
    assert [p.name for p in folder.iterdir()] == ["a" * 12]
    assert (folder / ("a" * 12) / ".run").exists()


def test_a_program_that_the_image_lacks_ends_the_run_before_it_starts(fake):
    overrides = "hardware=mi300x model=qwen3_4b topology=single profile=rocprof".split()
    config, _ = prepare(composed(*overrides, "method.args.save_strategy=no"))
    plan = make_plan(config, host_with(8), RUN)
    routes = {
        ("POST", "/containers/create.*"): (201, {"Id": "tools", "Warnings": []}),
        ("GET", "/containers/tools/json"): (200, {"Id": "tools", "Config": {"Tty": False}}),
        ("POST", "/containers/tools/wait.*"): (200, {"StatusCode": 0}),
        ("POST", "/containers/tools/start"): (204, b""),
        ("DELETE", "/containers/tools.*"): (204, b""),
    }
    logs = ("GET", "/containers/tools/logs.*")
    frames = {line: b"\x01" + len(line).to_bytes(7, "big") + line for line in (MISSING, b"[]\n")}
    asked = fake({**routes, logs: (200, frames[MISSING])})
    with pytest.raises(HostError, match=r"rocprofv3 is not in the image of container=rocm\b"):
        docker_engine.check_tools(docker_engine.connect(), plan, "sha256:1")
    assert any(request.startswith("DELETE") for request in asked)
    fake({**routes, logs: (200, frames[b"[]\n"])})
    docker_engine.check_tools(docker_engine.connect(), plan, "sha256:1")


def test_a_link_to_a_removed_data_set_is_replaced(tmp_path):
    source, folder, prepared = tmp_path / "a", tmp_path / "b", "set/default/0.0.0/hash"
    (source / prepared).mkdir(parents=True)
    link_data(source, folder)
    link_data(source, folder)
    assert (folder / prepared).readlink() == source / prepared
    (source / prepared).rmdir()
    link_data(source, folder)
    assert not (folder / prepared).is_symlink()
