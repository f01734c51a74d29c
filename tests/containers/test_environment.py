"""Test containers/environment.py."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import environment, images
from containers.environment import LOCKS
from launch.core.errors import HostError, UserError
from tests.helpers.build_examples import HASH

# ---- The build of torch


@pytest.mark.parametrize(("system", "has_nvidia", "requested", "build"), [
    ("Linux", False, "", "cpu"),
    ("Linux", False, "rocm", "rocm"),
    ("Linux", False, "image", "image"),
    ("Linux", True, None, "cuda"),
    ("Linux", False, "cuda", "cuda"),
    ("Linux", True, "cpu", "cpu"),
    ("Darwin", False, "cpu", "macos"),
    ("Darwin", False, "cuda", UserError),
    ("Windows", False, None, HostError),
])  # fmt: skip
def test_build_of_torch(
    system: str, has_nvidia: bool, requested: str | None, build: str | type[Exception]
) -> None:
    if isinstance(build, str):
        assert environment.choose_build(system, has_nvidia, requested) == build
    else:
        with pytest.raises(build):
            environment.choose_build(system, has_nvidia, requested)


# ---- The Python


OLD = "exit 1"  # a Python that is too old fails the test of its version
NEW = '[ "$1" = -c ] || echo "$0 $* $TORCH"'
# uv finds no Python until it has installed one.
UV = """case "$1 $2" in
  "python install") touch "$0.installed"; echo "$*" ;;
  "python find") [ -e "$0.installed" ] && echo "$(dirname "$0")/of_uv" ;;
esac"""


@pytest.mark.parametrize(("programs", "variables", "used"), [
    ({"python3": OLD, "python3.11": NEW}, [], "python3.11"),
    ({"python3": OLD, "python3.11": NEW, "uv": UV}, [], "python3.11"),
    ({"python3": OLD, "uv": UV, "of_uv": NEW}, [], "of_uv"),
    ({"other": UV, "of_uv": NEW}, ["UV=other"], "of_uv"),
    ({"python3": OLD, "of_image": NEW}, ["PYTHON=of_image"], "of_image"),
    ({"python3": OLD, "of_uv": NEW, "uv": "exit 1"}, [], None),  # without a network
    ({"python3": OLD}, [], None),
    ({"python3.11": NEW, "uv": UV, "mine": OLD}, ["PYTHON=mine"], None),
])  # fmt: skip
def test_python_of_make_setup(
    tmp_path: Path, programs: dict[str, str], variables: list[str], used: str | None
) -> None:
    for name, code in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("make", "sh", "touch", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    # This has no settings of the `make test` that runs this test.
    target = "setup-in-image" if used == "of_image" else "setup"
    argv, env = ["make", target, *variables], {"PATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, cwd=environment.ROOT, capture_output=True, text=True)
    if used:
        assert (done.returncode, done.stderr) == (0, "")
        torch = "image" if used == "of_image" else ""
        last = f"{tmp_path}/{used} containers/environment.py {torch}"
        assert done.stdout.splitlines()[-1] == last
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert "make setup PYTHON=" in done.stderr
        assert "make setup UV=" in done.stderr


# ---- The commands


@pytest.fixture(autouse=True)
def allow_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def test_pip_installs_if_uv_fails_or_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    (tmp_path / "bin").mkdir()
    python, lock = environment.venv_python(tmp_path), tmp_path / "a.lock"
    lock.write_text("a==1\n")
    code = '[ "$3" = config ] && exec python3 "$@" || echo "by pip: $*"'
    for file, text in ((python, code), (python.with_name("uv"), 'echo "$UV_FIND_LINKS"; exit 3')):
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        environment.install_all(tmp_path, [lock])
    first, second = (tmp_path / environment.LOG).read_text().split("a.lock: 1 packages\n")[1:]
    assert first.startswith("by pip: -m pip install")
    assert second.startswith("/wheels\nby pip: -m pip install")
    assert "--require-hashes" in first


def test_dead_proxy_with_a_configuration_without_retries(tmp_path, monkeypatch, capsys):
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nretries = 0\nindex-url = https://index.invalid/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    python, lock = environment.venv_python(tmp_path), tmp_path / "a.lock"
    lock.write_text(f"not-there-at-all==1 \\\n    {HASH}\n")
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert environment.finish(lambda: environment.install_all(tmp_path, [lock])) == 3
    assert "The proxy failed" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "named"), [
    ("OSError: [Errno 28] No space left on device", "TMPDIR"),
    ("'ProxyError('Cannot connect to proxy.'", "HTTPS_PROXY"),
    ("ERROR: No matching distribution found", "PIP_FIND_LINKS"),
])  # fmt: skip
def test_remedy_of_a_failed_step(capsys, output, named):
    def fails() -> bool:
        raise environment.install.failure("a.lock", output)

    assert environment.finish(fails) == 3
    shown = capsys.readouterr().err
    assert named in shown
    assert output in shown


@pytest.mark.parametrize(("build", "kept", "torch"), [
    ("cpu", (), "torch"),
    ("cuda", (), "torch_pypi"),
    ("macos", (), "torch_pypi"),
    ("rocm", (), None),
    ("image", {"torch": "2.13.0"}, None),
    ("image", {"torch": "2.13.0", "triton": "3.7"}, "liger"),
])  # fmt: skip
def test_locks_of_a_build(build, kept, torch):
    names = [lock.stem for lock in environment.lock_files(build, kept)]
    assert names[:2] == ["uv", "tools"]
    assert set(names[2:]) - {torch} == {"requirements", "dev", "compiled"}
    assert torch is None or torch in names


# ---- Setup, with uv and venv replaced


class Setup:
    """Run environment.setup on a temporary folder, and record its calls."""

    def __init__(self, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.venv, self.cleared, self.installed = venv, [], []
        self.has_nvidia = False
        monkeypatch.setattr(environment, "make_venv", self.make_venv)
        monkeypatch.setattr(
            environment, "fill", lambda venv, build, *_: self.installed.append(build)
        )
        monkeypatch.setattr(environment, "has_nvidia_driver", lambda: self.has_nvidia)

    def make_venv(self, venv: Path, base: str, clear: bool) -> None:
        self.cleared.append(clear)
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    def __call__(self, requested: str | None = None, python_named: bool = False) -> bool:
        return environment.setup(self.venv, requested, python_named)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(tmp_path / ".venv", monkeypatch)


def test_second_setup_does_nothing(setup: Setup) -> None:
    assert setup()
    assert not setup()
    assert not setup(python_named=True)
    assert (setup.installed, setup.cleared) == (["cpu"], [False])


def test_changed_lock_replaces_environment(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    for lock in LOCKS.glob("*.lock"):
        (locks / lock.name).write_bytes(lock.read_bytes())
    monkeypatch.setattr(environment, "LOCKS", locks)
    assert setup()
    with (locks / "dev.lock").open("a") as lock:
        lock.write("# another line\n")
    assert setup()
    assert not setup()
    assert setup.cleared == [False, True]


def test_requested_build_and_python_stay(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup()
    setup.has_nvidia = True
    assert setup()
    assert setup("cpu")
    assert not setup()
    assert setup.installed == ["cpu", "cuda", "cpu"]
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.13.0")
    assert not setup()
    assert setup(python_named=True)
    assert json.loads((setup.venv / environment.STAMP).read_text())["python"] == "3.13.0"


def test_repeat_interrupted_setup(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(venv: Path, *_: object) -> None:
        (venv / environment.LOG).touch()
        (venv / "lib" / "half_installed").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup()
    assert environment.read_stamp(setup.venv) == {}
    assert setup()
    assert setup.cleared == [False, True]
    assert not (setup.venv / "lib").exists()


def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit) as ended:
        environment.main(["--torch", "mps"])
    assert ended.value.code == 2

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "setup", interrupted)
    assert environment.main([]) == 75


# ---- The packages of an image


@pytest.mark.parametrize(("torch", "is_supported"), [
    ("2.10.0+git8514f05", False),
    ("2.11.0", True),
    ("2.13.0+rocm7.2", True),
    ("2.14.0.dev20261101+rocm7.2", False),
    (None, False),
])  # fmt: skip
def test_supported_torch(tmp_path, monkeypatch, torch, is_supported):
    site = tmp_path / "image" / "site-packages"
    for name, version in (("torch", torch), ("vllm", "0.31.0+rocm723"), ("numpy", "1.0")):
        (site / f"{name}.dist-info").mkdir(parents=True)
        metadata = f"Name: {name}\nVersion: {version}\n" if version else ""
        (site / f"{name}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [str(site), str(environment.VENV / "site-packages")])
    if is_supported:
        kept = {"torch": torch, "vllm": "0.31.0+rocm723"}
        assert environment.packages_of_image(environment.VENV) == kept
    else:
        with pytest.raises(HostError, match="^make setup-in-image: .*TORCH=rocm$"):
            environment.packages_of_image(environment.VENV)


def test_releases_of_torch_are_those_of_images_with_the_same_lock():
    torch = [
        tuple(map(int, re.findall(r"\d+", entry.torch)[:2]))
        for entry in images.load().values()
        if "cpu/requirements.lock" in entry.locks
    ]
    assert (min(torch), max(torch)) == (environment.OLDEST, environment.NEWEST)


# ---- Add-ons


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace pip by a function that returns `status`, on a machine that supports vLLM."""
    state = SimpleNamespace(argv=[], status=0, venv=tmp_path)

    def run(argv: tuple[str, ...], env: object) -> tuple[int, str]:
        state.argv.append(argv)
        print("ERROR: from pip")
        return state.status, "ERROR: from pip\n"

    monkeypatch.setattr(environment.install, "run", run)
    monkeypatch.setattr(environment, "pip_options", lambda python: {})
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    return state


def make(venv: Path, build: str = "cpu") -> None:
    """Create the files of an environment made by `make setup`."""
    environment.venv_python(venv).parent.mkdir()
    environment.venv_python(venv).touch()
    (venv / environment.STAMP).write_text(json.dumps({"torch": build}))


@pytest.mark.parametrize("name", environment.ADD_ONS)
def test_install_add_on_once(vllm: SimpleNamespace, name: str) -> None:
    make(vllm.venv)
    assert environment.add(vllm.venv, name)
    assert not environment.add(vllm.venv, name)
    (argv,) = vllm.argv
    assert argv[0] == str(vllm.venv / "bin" / "python")
    assert "--require-hashes" in argv
    assert f"{name}.lock: " in (vllm.venv / environment.LOG).read_text()


@pytest.mark.parametrize(
    ("name", "build", "machine"),
    [("vllm", "rocm", "x86_64"), ("vllm", "cpu", "aarch64"), ("kernels", "rocm", "x86_64")],
)
def test_reject_unsupported_add_on(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, build: str, machine: str
) -> None:
    make(vllm.venv, build)
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    with pytest.raises(HostError, match=f"make {name} needs .*make setup TORCH=cpu"):
        environment.add(vllm.venv, name)
    assert vllm.argv == []


def test_retry_after_failed_install(vllm: SimpleNamespace) -> None:
    make(vllm.venv)
    vllm.status = 1
    with pytest.raises(environment.install.PackagesError, match="ERROR: from pip"):
        environment.add(vllm.venv, "vllm")
    vllm.status = 0
    assert environment.add(vllm.venv, "vllm")


def test_error_is_one_line(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "VENV", vllm.venv)
    assert environment.main(["--add", "gguf"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    make(vllm.venv)
    assert (environment.main(["--add", "gguf"]), environment.main(["--add", "gguf"])) == (0, 0)
    assert capsys.readouterr().out.count("Ready in") == 1
