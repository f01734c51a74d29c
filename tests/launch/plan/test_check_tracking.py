"""launch/inputs/tracking.py: what a tracker needs, whether a group or tracking.name chose it."""

from __future__ import annotations

import pytest

from launch.config.compose import compose
from launch.core.errors import UserError
from launch.plan.check_files import check_files

KEY = "WANDB_API_KEY"


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as refusal:
        check_files(compose(["hardware=cpu", *overrides]), all_lines=False)
    return str(refusal.value)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a home directory, and a Python that has wandb."""
    (tmp_path / "lib/wandb").mkdir(parents=True)
    (tmp_path / "lib/wandb/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for name in (KEY, "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("given", ["tracking=wandb", "tracking.name=wandb"])
def test_wandb_without_a_key_is_refused(machine, given):
    said = refused(given, "runtime=local")
    assert said == (
        "tracking=wandb: WANDB_API_KEY is not set in your shell. Use: export WANDB_API_KEY=<your "
        "account's>, "
        "user_env.WANDB_MODE=offline, or tracking=tensorboard."
    )


@pytest.mark.parametrize("variable", [KEY, "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"])
def test_wandb_with_a_key_a_server_or_a_token_of_its_own(machine, monkeypatch, variable):
    monkeypatch.setenv(variable, "sentinel")
    check_files(compose(["hardware=cpu", "tracking=wandb", "runtime=local"]), all_lines=False)


@pytest.mark.parametrize("offline", ["shell", "user_env"])
def test_wandb_that_sends_nothing_needs_no_key(machine, monkeypatch, offline):
    if offline == "shell":
        monkeypatch.setenv("WANDB_MODE", "offline")
    given = ["user_env.WANDB_MODE=offline"] if offline == "user_env" else []
    check_files(
        compose(["hardware=cpu", "tracking=wandb", "runtime=local", *given]), all_lines=False
    )


@pytest.mark.parametrize("named", [True, False])
def test_wandb_finds_the_key_of_its_login(machine, monkeypatch, named):
    file = machine / ("mine" if named else ".netrc")
    if named:
        monkeypatch.setenv("NETRC", str(file))
    file.write_text("machine example.com login me password x\n")
    assert "WANDB_API_KEY is not set" in refused("tracking=wandb", "runtime=local")
    file.write_text("machine api.wandb.ai login user password x\n")
    check_files(compose(["hardware=cpu", "tracking=wandb", "runtime=local"]), all_lines=False)


def test_a_container_is_given_the_key_by_name_only(machine, monkeypatch):
    own = [
        "tracking=wandb",
        "runtime=docker",
        "container=custom",
        "container.reference=example.com/me/own:1",
    ]
    (machine / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "WANDB_API_KEY is not set in your shell" in refused(*own)
    monkeypatch.setenv(KEY, "sentinel")
    check_files(compose(["hardware=cpu", *own]), all_lines=False)
    said = refused(*own, "runtime.secrets=[HF_TOKEN]")
    assert "without WANDB_API_KEY. Use: WANDB_API_KEY among runtime.secrets" in said
    check_files(
        compose(
            ["hardware=cpu", *own, "runtime.secrets=[HF_TOKEN]", "user_env.WANDB_MODE=offline"]
        ),
        all_lines=False,
    )
