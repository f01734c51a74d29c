"""Test containers/add_ons.py."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import add_ons, environment
from launch.core.errors import HostError


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
    monkeypatch.setattr(add_ons.platform, "machine", lambda: "x86_64")
    return state


def make(venv: Path, build: str = "cpu") -> None:
    """Create the files of an environment made by `make setup`."""
    environment.venv_python(venv).parent.mkdir()
    environment.venv_python(venv).touch()
    (venv / environment.STAMP).write_text(json.dumps({"torch": build}))


@pytest.mark.parametrize("name", add_ons.ADD_ONS)
def test_install_add_on_once(vllm: SimpleNamespace, name: str) -> None:
    make(vllm.venv)
    assert add_ons.install(vllm.venv, name)
    assert not add_ons.install(vllm.venv, name)
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
    monkeypatch.setattr(add_ons.platform, "machine", lambda: machine)
    with pytest.raises(HostError, match=f"make {name} needs .*make setup TORCH=cpu"):
        add_ons.install(vllm.venv, name)
    assert vllm.argv == []


def test_retry_after_failed_install(vllm: SimpleNamespace) -> None:
    make(vllm.venv)
    vllm.status = 1
    with pytest.raises(environment.install.InstallError, match="ERROR: from pip"):
        add_ons.install(vllm.venv, "vllm")
    vllm.status = 0
    assert add_ons.install(vllm.venv, "vllm")


def test_error_is_one_line(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(add_ons, "VENV", vllm.venv)
    assert add_ons.main(["gguf"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    make(vllm.venv)
    assert (add_ons.main(["gguf"]), add_ons.main(["gguf"])) == (0, 0)
    assert capsys.readouterr().out.count("Ready in") == 1
