"""Test which packages and keys a tracker needs, chosen by its group or by tracking.name."""

from __future__ import annotations

import pytest

from launch.core.errors import UserError
from launch.plan.check_files import check_files
from tests.conftest import composed

KEY = "WANDB_API_KEY"
LOCAL = "tracking=wandb runtime=local"
DOCKER = "tracking=wandb runtime=docker container=custom container.reference=example.com/me/own:1"
UNSET = "tracking=wandb: WANDB_API_KEY is not set in your shell. Use: export WANDB_API_KEY"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a home directory and a module wandb that Python finds."""
    (tmp_path / "lib/wandb").mkdir(parents=True)
    (tmp_path / "lib/wandb/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for name in (KEY, "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("overrides", "environ", "login", "problem"), [
    (LOCAL, {}, None, UNSET),
    ("tracking.name=wandb runtime=local", {}, None, UNSET),
    (LOCAL, {KEY: "sentinel"}, None, None),
    (LOCAL, {"WANDB_BASE_URL": "sentinel"}, None, None),
    (LOCAL, {"WANDB_IDENTITY_TOKEN_FILE": "sentinel"}, None, None),
    (LOCAL, {"WANDB_MODE": "offline"}, None, None),
    (f"{LOCAL} user_env.WANDB_MODE=offline", {}, None, None),
    (LOCAL, {}, "example.com", UNSET),
    (LOCAL, {}, "api.wandb.ai", None),
    # a container gets the key by name only, and not the shell's other settings
    (DOCKER, {"WANDB_MODE": "offline"}, "api.wandb.ai", UNSET),
    (DOCKER, {KEY: "sentinel"}, None, None),
    (f"{DOCKER} runtime.secrets=[HF_TOKEN]", {KEY: "sentinel"}, None, "has no WANDB_API_KEY"),
    (f"{DOCKER} runtime.secrets=[HF_TOKEN] user_env.WANDB_MODE=offline", {}, None, None),
])  # fmt: skip
def test_wandb_needs_a_key(machine, monkeypatch, overrides, environ, login, problem):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if login:
        (machine / ".netrc").write_text(f"machine {login} login user password x\n")
    config = composed("hardware=cpu", *overrides.split())
    if problem is None:
        check_files(config, all_lines=False)
    else:
        with pytest.raises(UserError, match=problem):
            check_files(config, all_lines=False)
