"""Test containers/add_ons.py: what is added to the environment where, from which lock, and once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import add_ons, environment
from containers.environment import LOCKS
from launch.core.errors import HostError, UserError


@pytest.mark.parametrize(
    ("build", "system", "machine", "flags", "said"),
    [
        ("cpu", "Linux", "aarch64", {"asimd"}, "with AVX2, and this is Linux on aarch64"),
        ("macos", "Darwin", "arm64", set(), "with AVX2, and this is Darwin on arm64"),
        ("cpu", "Linux", "x86_64", {"avx"}, "and this is Linux on x86_64 without AVX2"),
        (
            "rocm",
            "Linux",
            "x86_64",
            {"avx2"},
            "has that for rocm. Use: make setup TORCH=cpu, then make vllm",
        ),
    ],
)
def test_a_machine_without_a_build_of_vllm_is_refused(
    build: str, system: str, machine: str, flags: set[str], said: str
) -> None:
    assert said in str(add_ons.vllm_refusal(build, system, machine, flags))


@pytest.mark.parametrize(
    ("build", "system", "said"),
    [
        ("macos", "Darwin", "Triton is for Linux, and this is Darwin"),
        (
            "rocm",
            "Linux",
            "its own Triton, which a second one would overwrite. Use: make setup TORCH=cpu",
        ),
    ],
)
def test_triton_is_refused_where_it_cannot_be_added(build: str, system: str, said: str) -> None:
    assert said in str(add_ons.kernels_refusal(build, system))
    assert add_ons.kernels_refusal("cpu", "Linux") is None
    assert add_ons.kernels_refusal("cuda", "Linux") is None


def test_instruction_sets_are_read_as_linux_lists_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert add_ons.cpu_flags(file) == set()
    file.write_text(
        "processor\t: 0\nflags\t\t: fpu avx avx2\nbugs\t\t: spectre_v1\n\nprocessor\t: "
        "1\nflags\t\t: fpu avx avx2\n"
    )
    assert add_ons.cpu_flags(file) == {"fpu", "avx", "avx2"}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for a machine that has a build of vLLM, and for a pip that ends with `status`."""
    state = SimpleNamespace(argv=[], status=0, venv=tmp_path)

    def run(_: environment.Progress, argv: tuple[str, ...]) -> tuple[int, str]:
        state.argv.append(argv)
        return state.status, "ERROR: what uv said\n"

    monkeypatch.setattr(environment.Progress, "run", run)
    monkeypatch.setattr(add_ons, "cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(add_ons.platform, "system", lambda: "Linux")
    monkeypatch.setattr(add_ons.platform, "machine", lambda: "x86_64")
    return state


def made(venv: Path) -> None:
    """Lay out an environment as `make setup` leaves it."""
    environment.venv_python(venv).parent.mkdir()
    environment.venv_python(venv).touch()
    (venv / environment.STAMP).write_text(json.dumps({"torch": "cpu"}))


@pytest.mark.parametrize("name", add_ons.ADD_ONS)
def test_an_add_on_comes_from_its_lock_once(vllm: SimpleNamespace, name: str) -> None:
    made(vllm.venv)
    assert add_ons.add_on(vllm.venv, name)
    assert not add_ons.add_on(vllm.venv, name)
    python = str(vllm.venv / "bin" / "python")
    assert vllm.argv == [environment.install_lock(Path(python), LOCKS / f"{name}.lock")[1]]


def test_vllm_without_an_environment_is_refused(vllm: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="Run make setup first"):
        add_ons.add_on(vllm.venv, "vllm")


def test_vllm_on_a_machine_without_a_build_is_the_hosts_fault(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(vllm.venv)
    monkeypatch.setattr(add_ons, "cpu_flags", set)
    with pytest.raises(HostError, match="without AVX2"):
        add_ons.add_on(vllm.venv, "vllm")
    assert vllm.argv == []


def test_vllm_that_cannot_be_installed_is_tried_again(vllm: SimpleNamespace) -> None:
    made(vllm.venv)
    vllm.status = 1
    with pytest.raises(
        HostError, match=r"vLLM's build for the CPU could not be installed.*setup\.log"
    ) as refusal:
        add_ons.add_on(vllm.venv, "vllm")
    assert "what uv said" in str(refusal.value)
    vllm.status = 0
    assert add_ons.add_on(vllm.venv, "vllm")


def test_a_refusal_is_one_message_without_a_traceback(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(add_ons, "VENV", vllm.venv)
    assert add_ons.main(["gguf"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    made(vllm.venv)
    assert (add_ons.main(["gguf"]), add_ons.main(["gguf"])) == (0, 0)
    assert capsys.readouterr().out.count("Ready in") == 1
