"""Test runtime=kubernetes: the manifest, and the command that the pod runs.

`UPDATE_GOLDEN=1 pytest <this file>` writes the golden manifests anew; read the diff.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from launch.config.compose import compose
from launch.config.identity import identity_of
from launch.config.request import Request
from launch.core.errors import UserError
from launch.execution import kubernetes
from launch.plan.planning import make_plan, prepare
from launch.plan.process_env import ROOT
from launch.schema.plan import Plan
from tests.conftest import host_with

KUBERNETES = "1.37"  # version of the schemas
GOLDEN = Path(__file__).parents[3] / "tests/golden/kubernetes"
IMAGE = ["container=custom", f"container.reference=example.com/me/rocm@sha256:{'0' * 64}"]
BASE = ["runtime=kubernetes", "mode=plan", *IMAGE]
MANIFESTS = {
    "ddp": "hardware=mi300x model=qwen3_4b".split(),
    "split": (
        "hardware=mi300x model=qwen3_4b method=grpo runtime.kubernetes.claim=team "
        "runtime.kubernetes.secret=keys runtime.secrets=[HF_TOKEN] "
        "runtime.pass_env=[WANDB_API_KEY] runtime.shm_gb=64 "
        "runtime.memory_gb=1500 runtime.stop_timeout_s=900 "
        "user_env.GREETING='$(HOME)' runtime.public_env=[GREETING]"
    ).split(),
    "nvidia": "hardware=h200 model=qwen3_4b topology.num_gpus=2".split(),
}
SHELL = {
    "HF_TOKEN": "hf_verysecret",
    "NCCL_DEBUG": "INFO",
    "NCCL_TOPO_FILE": "/etc/topology.xml",
    "HIP_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0",
}


def planned(*overrides: str, **environ: str) -> Plan:
    request = Request([*BASE, *overrides])
    host = dataclasses.replace(host_with(8, **environ), cwd=str(ROOT))
    config, warnings = prepare(compose(request), request.keys)
    return make_plan(config, host, Path("/shared/runs/1"), warnings, request)


def rendered(*overrides: str, **environ: str) -> dict:
    plan = planned(*overrides, **environ)
    host = dataclasses.replace(host_with(8, **environ), cwd=str(ROOT))
    return yaml.safe_load(kubernetes.as_yaml(plan, host))


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_follows_the_schemas_of_kubernetes(name):
    validator = pytest.importorskip("kubernetes_validate")
    manifest = rendered(*MANIFESTS[name])
    validator.validate(manifest, KUBERNETES, strict=True)
    pod_of(manifest)["containers"][0]["imgae"] = "misspelled"
    with pytest.raises(validator.ValidationError):
        validator.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest(name):
    manifest = rendered(*MANIFESTS[name], **(SHELL if name == "split" else {}))
    text = yaml.safe_dump(manifest, sort_keys=False)
    assert "hf_verysecret" not in text
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        (["hardware=mi300x"], {"amd.com/gpu": 8}),
        (["hardware=mi300x", "topology.num_gpus=4"], {"amd.com/gpu": 4}),
        (["hardware=mi300x", "method=grpo", "topology=split"], {"amd.com/gpu": 8}),  # 7 + 1
        (["hardware=mi300x", "topology=single"], {"amd.com/gpu": 1}),
        (
            ["hardware=h100", "topology=fsdp", "runtime.memory_gb=900"],
            {"nvidia.com/gpu": 8, "memory": "900G"},
        ),
        (["hardware=mi300x", "smoke=true"], {}),
    ],
)
def test_limits(overrides, limits):
    assert pod_of(rendered(*overrides))["containers"][0]["resources"]["limits"] == limits


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pod_trains_what_was_planned(name):
    container = pod_of(rendered(*MANIFESTS[name]))["containers"][0]
    argv = [argument.replace("$$", "$") for argument in container["command"]]
    assert argv[:2] == ["python3", f"{kubernetes.CODE}/launch/run.py"]
    in_pod, _ = prepare(compose(Request(argv[2:])))
    config = planned(*MANIFESTS[name]).config
    assert (in_pod.runtime.name, in_pod.mode.name) == ("local", "run")
    assert in_pod.runtime.stop_timeout_s == config.runtime.stop_timeout_s
    same = {**identity_of(config), "runtime": None, "container": None}
    assert {**identity_of(in_pod), "runtime": None, "container": None} == same


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([f"run_root={ROOT}/runs"], None),
        (["run_root=/workspace/runs"], None),
        ([f"run_root={ROOT}/runs", "data=jsonl", f"data.path={ROOT}/examples/chat.jsonl"], None),
        (["run_root=/data/runs"], "run_root"),
        ([f"run_root={ROOT}/../../runs"], "run_root"),
        (["data=jsonl", "data.path=/data/rows.jsonl"], "data"),
    ],
)
def test_the_pod_sees_only_the_claim(overrides, problem):
    request = Request([*BASE, *overrides])
    host = dataclasses.replace(host_with(8), cwd=str(ROOT))
    if problem is None:
        kubernetes.check(compose(request), host, request)
        return
    with pytest.raises(UserError, match=rf"\({problem}\)"):
        kubernetes.check(compose(request), host, request)


def test_paths_of_the_repository_are_translated():
    pod = pod_of(rendered("data=jsonl", f"data.path={ROOT}/examples/chat.jsonl"))
    assert f"data.path={kubernetes.CODE}/examples/chat.jsonl" in pod["containers"][0]["command"]
    for cwd, expected in ((ROOT, ""), (ROOT / "examples", "/examples"), (ROOT.parent, "")):
        host = dataclasses.replace(host_with(0), cwd=str(cwd))
        assert kubernetes.working_directory(host) == f"{kubernetes.CODE}{expected}"


def test_names_of_jobs_are_valid_and_differ():
    overrides = ("seed=1", "seed=2", f"name={'A_' * 40}")
    names = {rendered(override)["metadata"]["name"] for override in overrides}
    assert len(names) == 3
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,61}[a-z0-9]", name) for name in names)


def test_without_mode_plan_it_prints_the_command_and_starts_nothing(launch, tmp_path):
    job = ["runtime=kubernetes", "hardware=cpu", "user_env.TZ=a b"]
    done = launch(*job)
    assert done.code == 2
    command = f"launch/run.py {shlex.join(job)} mode=plan format=json"
    assert f"{command} | jq .manifest | kubectl apply -f -" in done.err
    assert not os.listdir(tmp_path)
    done = launch(*job, "mode=plan", "format=json")
    assert json.loads(done.out)["manifest"]["kind"] == "Job", done.err
