"""Test vLLM's benchmark with a real vLLM, its build for the CPU.

Its programs are run and their output is read, and its parser knows our arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.bench import vllm_programs as programs
from tests.conftest import ROOT, command
from tests.integration.conftest import skip_without
from tests.integration.test_split import processes

pytestmark = pytest.mark.integration

SMALL = ["hardware=mi350x", "method=bench/vllm", "model=qwen3_4b", "smoke=true"]
OPTIONS = """
import json
from vllm.benchmarks import latency, serve, throughput
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = {}
modules = {"throughput": throughput, "serve": serve, "latency": latency, "engine": EngineArgs}
for name, add in modules.items():
    parser = FlexibleArgumentParser()
    add.add_cli_args(parser)
    found[name] = sorted(option for action in parser._actions for option in action.option_strings)
print(json.dumps(found))
"""
ENDS_WITHIN_S = 1200  # timeout of several starts of an engine on two busy cores


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")


@pytest.fixture(scope="module")
def options() -> dict[str, list[str]]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes/smoke'}"}
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_removed_arguments_are_not_in_vllm(options):
    removed = [name for name in programs.REMOVED if not name.isupper()]
    assert [name for name in removed if "--" + name.replace("_", "-") in options["engine"]] == []


def test_replacements_and_used_arguments_are_in_vllm(options):
    method = yaml.safe_load((ROOT / "conf/method/bench/vllm.yaml").read_text())
    known = {
        option[2:].replace("-", "_") for option in options["throughput"] if option.startswith("--")
    }
    replacements = {
        word.strip("{:,;")
        for text in programs.REMOVED.values()
        for word in text.split()
        if "_" in word
    }
    replacements -= {*programs.REMOVED, "rope_parameters"}  # a key within hf_overrides
    assert {word for word in replacements if word == word.lower()} <= known
    used = {
        name
        for setting in [*method["args"]["settings"], method["smoke"]["base"]]
        for name in setting
        if not name.isupper()
    } - set(programs.OURS)
    assert used <= known
    lengths = "random-input-len random-output-len random-range-ratio dataset-name num-prompts seed"
    lengths += " dataset-path profile"
    for program, names in {
        "throughput": f"{lengths} output-json num-warmups",
        "serve": f"{lengths} max-concurrency num-warmups percentile-metrics metric-percentiles "
        "ignore-eos result-filename disable-tqdm",
        "latency": "batch-size num-iters num-iters-warmup input-len output-len profile",
    }.items():
        assert {f"--{name}" for name in names.split()} <= set(options[program])


def result_of(folder: Path) -> dict:
    (file,) = folder.glob("runs/*/[0-9]*/result.json")
    return json.loads(file.read_text())


def test_two_engines_and_one_that_fails(tmp_path):
    """Measure over HTTP. test_tunings.py measures offline."""
    settings = [
        "method.smoke.settings=[{max_num_sequences: 4}, {}, {tensor_parallel_size: 4}]",
        "+method.smoke.kinds=[served]",
    ]
    done = command(*SMALL, *settings, "topology.num_gpus=2", cwd=tmp_path, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(tmp_path)
    broken, served = result["rows"]
    assert (
        "unrecognized arguments: --max-num-sequences 4 (exit code 2; logs/vllm" in broken["error"]
    )
    assert served["error"] is None
    shape = {"num_gpus": 2, "engines": 2, "input": 16, "output": 8}
    assert shape.items() <= served.items()
    total = 3 * served["output_tokens_per_second"]
    assert served["total_tokens_per_second"] == pytest.approx(total, rel=0.05)
    assert served["output_tokens_per_second"] > 0
    assert served["ttft_p99_ms"] >= served["ttft_ms"] > 0
    assert served["itl_p99_ms"] >= served["itl_ms"] > 0
    assert any(note.startswith("tensor_parallel_size=4: left out") for note in result["notes"])
    assert processes(tmp_path) == []
