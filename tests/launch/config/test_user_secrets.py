"""Test that secrets of user_env reach processes and nothing that is written or printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.config.request import Request
from launch.config.user_secrets import to_environment
from launch.execution import record
from launch.plan import container
from launch.plan.planning import make_plan, prepare, rank_config
from launch.plan.views import as_json
from tests.conftest import composed, host_with

VALUE = "sentinel (a=b"
PASSWORD = "https://me:sentinel@example.org"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(("override", "name", "value"), [
    *((f"user_env.{name}={VALUE}", name, VALUE)
      for name in ("DB_PASS", "GH_PAT", "WANDB_KEY", "HF_PW", "MY_PASSWD", "SSH_PRIVATE_KEY",
                   "AUTH", "MY_FLAG", "HF_TOKEN", "VLLM_API_KEY", "MLFLOW_TRACKING_PASSWORD")),
    (f"++user_env.DB_PASS='{VALUE}'", "DB_PASS", VALUE),
    (f"user_env.HTTPS_PROXY={PASSWORD}", "HTTPS_PROXY", PASSWORD),
    ("user_env.HTTPS_PROXY=u:sentinel@p:3128", "HTTPS_PROXY", "u:sentinel@p:3128"),
    (f"user_env.HF_ENDPOINT={PASSWORD}/x", "HF_ENDPOINT", f"{PASSWORD}/x"),
    ("user_env.HF_ENDPOINT=https://sentinel@example.org", "HF_ENDPOINT", "https://sentinel@example.org"),
    ("user_env.HF_ENDPOINT=https://h/?token=sentinel", "HF_ENDPOINT", "https://h/?token=sentinel"),
])  # fmt: skip
@pytest.mark.parametrize("runtime", ["local", "docker"])
def test_a_secret_reaches_processes_but_no_record(capsys, override, name, value, runtime):
    arguments = to_environment(["hardware=cpu", f"runtime={runtime}", override])
    config, warnings = prepare(composed(*arguments))
    host = host_with(0, **os.environ)
    plan = make_plan(config, host, Path("/runs/1"), warnings, Request(arguments))
    specs = [container.sdk_arguments(spec) for spec in plan.containers.values()]
    image = {"id": "1"} if runtime == "docker" else None
    content = [as_json(plan), rank_config(plan), record.begin(plan, host, image), specs]
    assert "sentinel" not in json.dumps(content)
    assert "sentinel" not in "".join(capsys.readouterr())
    passed = {n for p in plan.processes for n in p.inherited}
    passed |= {n for spec in plan.containers.values() for n in spec.secrets}
    assert (name in passed, os.environ[name]) == (True, value)


@pytest.mark.parametrize("arguments", [
    ["user_env.NCCL_DEBUG=INFO"],
    ["user_env.HTTPS_PROXY=http://proxy:3128"],
    ["user_env.ACCELERATE_MIXED_PRECISION=bf16"],
    ["user_env.MY_FLAG=1", "runtime.public_env=[MY_FLAG]"],
    ["user_env.MY_FLAG=1", "++runtime.public_env=[MY_FLAG]"],
    ["user_env.MY_FLAG=${oc.env:HOME}"],
    ["-m", "user_env.MY_FLAG=1,2"],
    ["user_env={MY_FLAG: 1}"],
    ["user_env.WORLD_SIZE=2"],
    ["name=user_env.MY_FLAG"],
])  # fmt: skip
def test_other_arguments_stay(arguments):
    before = dict(os.environ)
    assert to_environment(arguments) == arguments
    assert os.environ == before


@pytest.mark.parametrize("value", [
    "https://host/?a=b&c=d@e", "a,b", "it's", "x: {y", "true", "${oc.env:HOME}", "'a=b'", VALUE,
])  # fmt: skip
def test_a_public_value_may_contain_any_text(value):
    arguments = to_environment([f"user_env.MY_URL={value}", "runtime.public_env=[MY_URL]"])
    expected = {"${oc.env:HOME}": os.environ["HOME"], "'a=b'": "a=b"}.get(value, value)
    assert composed(*arguments).user_env["MY_URL"] == expected


def test_the_users_list_is_extended():
    arguments = ["+runtime.pass_env=[B]", "seed=1", "user_env.A=1", "user_env.C=2"]
    assert to_environment(arguments) == ["seed=1", "runtime.pass_env=[B,A,C]"]


def test_a_command_prints_no_secret(launch):
    done = launch("mode=plan", "format=json", "hardware=cpu", f"user_env.DB_PASS={VALUE}")
    assert (done.code, "sentinel" in done.out + done.err) == (0, False)
    assert "DB_PASS" in done.err
    json.loads(done.out)
