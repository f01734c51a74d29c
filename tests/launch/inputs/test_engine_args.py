"""Test that topology.server_args are checked against the locked vLLM and reach the engines."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from trl.generation import vllm_generation

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.estimate import memory
from launch.machine import this_python
from launch.machine.gpu import GIB
from launch.plan.planning import make_plan, prepare
from launch.rules.check import check
from launch.schema.trainer_args import lock
from recipes.sampling import generation, serving
from tests.conftest import composed, host_with

MODEL = ["hardware=mi300x", "model=qwen3_4b", "runtime=local"]
SPLIT = [*MODEL, "method=grpo", "topology=split", "topology.num_gpus=4"]
COLOCATE = [*MODEL, "method=grpo", "topology=colocate"]
EVALUATE = [*MODEL, "method=evaluate", "topology=single", "method.args.engine=vllm"]


def planned(*overrides: str, tmp_path):
    config, warnings = prepare(composed(*overrides))
    return make_plan(config, host_with(8), tmp_path, warnings)


def server_args_overrides(**args: object) -> list[str]:
    return [f"topology.server_args.{name}={value}" for name, value in args.items()]


@pytest.mark.parametrize(("args", "names"), [
    ({"max_num_seq": 512}, ["max_num_seq=512", "max_num_seqs", lock()["vllm"]]),
    ({"max_num_seqs": "many"}, ["'many'", "int"]),
    ({"max_num_seqs": 512.0}, ["512.0", "topology.server_args.max_num_seqs=512"]),
    ({"enforce_eager": "yes"}, ["'yes'", "bool"]),
    ({"kv_cache_dtype": "fp9"}, ["fp9", "fp8_e4m3"]),
    ({"attention_backend": "ROCM_AITER"}, ["ROCM_AITER_FA"]),
    ({"compilation_config": 3}, ["3", "dict"]),
    ({"num_scheduler_steps": 8}, ["removed from vLLM", "async_scheduling"]),
    ({"VLLM_ROCM_USE_AITER": 1}, ["user_env.VLLM_ROCM_USE_AITER"]),
    ({"port": 8000}, ["port=8000", "free port"]),
    ({"api_server_count": 0}, ["at least 1"]),
    ({"tensor_parallel_size": 2}, ["topology.server_tensor_parallel="]),
    ({"gpu_memory_utilization": 0.5}, ["topology.server_memory_share="]),
])  # fmt: skip
def test_arguments_that_vllm_rejects_or_another_key_sets(args, names):
    with pytest.raises(UserError) as raised:
        check(composed(*SPLIT, *server_args_overrides(**args)))
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"topology.server_args.{next(iter(args))}=")
    assert all(name in str(raised.value) for name in names)


def test_the_server_gets_the_arguments(tmp_path):
    args = {
        "max_num_seqs": 512,
        "enable_prefix_caching": "false",
        "async_scheduling": "true",
        "compilation_config": "{cudagraph_capture_sizes: [96]}",
        "cudagraph_capture_sizes": "[1,96]",
        "quantization": "null",
        "api_server_count": 1,
    }
    server = planned(*SPLIT, *server_args_overrides(**args), tmp_path=tmp_path).processes[0]
    plain_server = planned(*SPLIT, tmp_path=tmp_path).processes[0]
    assert server.argv[: len(plain_server.argv)] == plain_server.argv
    assert server.argv[len(plain_server.argv) :] == [
        *["--max-num-seqs", "512", "--no-enable-prefix-caching", "--async-scheduling"],
        *[
            "--compilation-config",
            '{"cudagraph_capture_sizes": [96]}',
            *"--cudagraph-capture-sizes 1 96 --api-server-count 1".split(),
        ],
    ]


@pytest.mark.parametrize(("overrides", "flag"), [
    ([], "--skip-tokenizer-init"),
    (["method.args.generation_kwargs={stop: [END]}"], None),  # vLLM would ignore it
    (["method.args.vllm_structured_outputs_regex=a+"], None),
    (server_args_overrides(skip_tokenizer_init="false"), "--no-skip-tokenizer-init"),
])  # fmt: skip
def test_a_server_has_a_tokenizer_if_text_is_requested(tmp_path, overrides, flag):
    argv = planned(*SPLIT, *overrides, tmp_path=tmp_path).processes[0].argv
    assert (
        next((option for option in reversed(argv) if option.endswith("skip-tokenizer-init")), None)
        == flag
    )


def test_the_engine_of_an_evaluation_gets_the_arguments():
    config = OmegaConf.create(
        plain(composed(*EVALUATE, *server_args_overrides(kv_cache_dtype="fp8", block_size="null")))
    )
    assert generation.engine_args(config) == {"kv_cache_dtype": "fp8"}


def test_memory_of_fp8_cache_and_weights(tmp_path):
    before, after = (
        planned(*SPLIT, *args, tmp_path=tmp_path).memory[0].parts_gb
        for args in ([], server_args_overrides(quantization="fp8"))
    )
    linear = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert before["weights"] - after["weights"] == pytest.approx(linear / 1e9)
    assert (
        sum(before.values()) == pytest.approx(sum(after.values())) == pytest.approx(0.9 * 192 * GIB)
    )
    longest = [
        memory.longest_served_gb(composed(*SPLIT, *args))
        for args in ([], server_args_overrides(kv_cache_dtype="fp8_e4m3"))
    ]
    assert longest[1] == longest[0] / 2  # the least with which a server starts


def test_a_smoke_run_keeps_only_arguments_for_a_cpu(monkeypatch):
    monkeypatch.setattr(this_python, "has_vllm_of_cpu", lambda: True)
    small, warnings = prepare(
        composed(
            *EVALUATE,
            "smoke=true",
            *server_args_overrides(max_num_seqs=8, attention_backend="ROCM_AITER_FA"),
        )
    )
    assert small.topology.server_args == {"max_num_seqs": 8}
    assert any("ROCM_AITER_FA" in line for line in warnings)
    monkeypatch.setattr(this_python, "has_vllm_of_cpu", lambda: False)
    small, warnings = prepare(composed(*EVALUATE, "smoke=true"))
    assert small.method.args["engine"] == "transformers"
    assert any("engine=vllm" in line for line in warnings)


@pytest.mark.parametrize(("topology", "arguments"), [
    ("colocate", {"max_num_seqs": 512, "language_model_only": True}),
    ("split", {"max_num_seqs": 256}),
])  # fmt: skip
def test_trls_engine_gets_the_arguments_under_colocate(topology, arguments, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", dict, raising=False)
    serving.pass_engine_args(
        OmegaConf.create(
            {
                "topology": {
                    "name": topology,
                    "server_args": {"max_num_seqs": 512, "block_size": None},
                }
            }
        )
    )
    assert vllm_generation.LLM(model="m", max_num_seqs=256) == {"model": "m", **arguments}
