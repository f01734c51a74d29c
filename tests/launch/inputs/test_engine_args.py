"""topology.server_args: checked against the list of the locked vLLM, and where they arrive."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from trl.generation import vllm_generation

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.estimate import memory
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


def given(**args: object) -> list[str]:
    return [f"topology.server_args.{name}={value}" for name, value in args.items()]


@pytest.mark.parametrize(("args", "names"), [
    ({"max_num_seq": 512}, ["max_num_seq=512", "max_num_seqs", lock()["vllm"]]),
    ({"max_num_seqs": "many"}, ["'many'", "int"]),
    ({"max_num_seqs": 512.0}, ["512.0", "topology.server_args.max_num_seqs=512"]),
    ({"enforce_eager": "yes"}, ["'yes'", "bool"]),
    ({"kv_cache_dtype": "fp9"}, ["fp9", "fp8_e4m3"]),
    ({"attention_backend": "ROCM_AITER"}, ["ROCM_AITER_FA"]),
    ({"compilation_config": 3}, ["3", "dict"]),
    ({"num_scheduler_steps": 8}, ["is gone", "async_scheduling"]),
    ({"VLLM_ROCM_USE_AITER": 1}, ["user_env.VLLM_ROCM_USE_AITER"]),
    ({"port": 8000}, ["port=8000", "free port"]),
    ({"tensor_parallel_size": 2}, ["topology.server_tensor_parallel="]),
    ({"gpu_memory_utilization": 0.5}, ["topology.server_memory_share="]),
])  # fmt: skip
def test_what_vllm_lacks_or_another_key_decides_is_rejected_with_one_message(args, names):
    with pytest.raises(UserError) as refused:
        check(composed(*SPLIT, *given(**args)))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"topology.server_args.{next(iter(args))}=")
    assert all(name in str(refused.value) for name in names)


def test_the_server_is_started_with_them(tmp_path):
    args = {
        "max_num_seqs": 512,
        "enable_prefix_caching": "false",
        "async_scheduling": "true",
        "compilation_config": "{cudagraph_capture_sizes: [96]}",
        "cudagraph_capture_sizes": "[1,96]",
        "quantization": "null",
    }
    server = planned(*SPLIT, *given(**args), tmp_path=tmp_path).processes[0]
    plain_server = planned(*SPLIT, tmp_path=tmp_path).processes[0]
    assert server.argv[: len(plain_server.argv)] == plain_server.argv
    assert server.argv[len(plain_server.argv) :] == [
        *["--max-num-seqs", "512", "--no-enable-prefix-caching", "--async-scheduling"],
        *[
            "--compilation-config",
            '{"cudagraph_capture_sizes": [96]}',
            *"--cudagraph-capture-sizes 1 96".split(),
        ],
    ]


@pytest.mark.parametrize(("overrides", "flag"), [
    ([], "--skip-tokenizer-init"),
    (["method.args.generation_kwargs={stop: [END]}"], None),  # vLLM would ignore it
    (["method.args.vllm_structured_outputs_regex=a+"], None),
    (given(skip_tokenizer_init="false"), "--no-skip-tokenizer-init"),
])  # fmt: skip
def test_a_server_has_a_tokenizer_where_text_is_asked_for(tmp_path, overrides, flag):
    argv = planned(*SPLIT, *overrides, tmp_path=tmp_path).processes[0].argv
    assert (
        next((option for option in reversed(argv) if option.endswith("skip-tokenizer-init")), None)
        == flag
    )


def test_an_evaluations_engine_gets_them():
    config = OmegaConf.create(
        plain(composed(*EVALUATE, *given(kv_cache_dtype="fp8", block_size="null")))
    )
    assert generation.engine_args(config) == {"kv_cache_dtype": "fp8"}


def test_a_cache_and_weights_of_eight_bits_are_planned_as_such(tmp_path):
    before, after = (
        planned(*SPLIT, *args, tmp_path=tmp_path).memory[0].parts_gb
        for args in ([], given(quantization="fp8"))
    )
    linear = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert before["weights"] - after["weights"] == pytest.approx(linear / 1e9)
    assert (
        sum(before.values()) == pytest.approx(sum(after.values())) == pytest.approx(0.9 * 192 * GIB)
    )
    longest = [
        memory.longest_served_gb(composed(*SPLIT, *args))
        for args in ([], given(kv_cache_dtype="fp8_e4m3"))
    ]
    assert longest[1] == longest[0] / 2  # what a server does not start without


def test_of_a_smoke_run_only_what_a_cpu_has_stays():
    small, warnings = prepare(
        composed(*EVALUATE, "smoke=true", *given(max_num_seqs=8, attention_backend="ROCM_AITER_FA"))
    )
    assert small.topology.server_args == {"max_num_seqs": 8}
    assert any("ROCM_AITER_FA" in line for line in warnings)


@pytest.mark.parametrize(("topology", "sequences"), [("colocate", 512), ("split", 256)])
def test_under_colocate_trls_engine_is_made_with_them(topology, sequences, monkeypatch):
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
    assert vllm_generation.LLM(model="m", max_num_seqs=256) == {
        "model": "m",
        "max_num_seqs": sequences,
    }
