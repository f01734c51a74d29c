"""Test plans of model directories that are damaged or that ranks cannot load."""

import json
import re
from importlib import metadata

import pytest

from tests.conftest import TINY, leave_model

QWEN3_0_6B = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024}
QWEN3_0_6B |= {"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3_0_6B |= {"vocab_size": 151936, "max_position_embeddings": 40960}

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


@pytest.mark.parametrize(("content", "message"), [
    ("{", "damaged: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[" * 100_000, "damaged: maximum recursion depth"),
    ("[1]", "damaged: it must be a JSON object"),
], ids=range(3))  # fmt: skip
def test_a_malformed_config_is_rejected(launch, tmp_path, content, message):
    leave_model(tmp_path)
    (tmp_path / "config.json").write_text(content)
    done = launch("hardware=cpu", f"model.path={tmp_path}", "mode=plan")
    assert done.code == 2
    assert done.err.startswith(f"{tmp_path}/config.json: {message}")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    assert launch("hardware=cpu", f"model.path={tmp_path}", "mode=plan").code == 0


# file | content | words of the message; {} stands for the directory
@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", '{"model_type": "qwen9"}', "{}/config.json: model_type qwen9: "),
    ("config.json", "{}", "{}/config.json: model_type None: "),
    ("config.json", '{"model_type": "qwen2_vl"}', "{}/config.json: model_type qwen2_vl: "),
    ("config.json", '{"model_type": "mine", "auto_map": {}}', "code in a model directory is not"),
    ("generation_config.json", "{", "{}/generation_config.json: damaged"),
    ("tokenizer_config.json", "[]", "{}/tokenizer_config.json: damaged"),
    ("special_tokens_map.json", "", "{}/special_tokens_map.json: damaged"),
    ("tokenizer.json", LFS, "{}/tokenizer.json: only Git LFS's pointer"),
    ("model.safetensors", LFS, "{}/model.safetensors: only Git LFS's pointer"),
    *(("config.json", json.dumps({**QWEN3_0_6B, "quantization_config": {"quant_method": method}}),
       f"{{}} with {method} weights: the package {package} is not installed. Use: pip install")
      for method, package in {"awq": "gptqmodel", "gptq": "optimum", "quark": "amd-quark",
                              "quanto": "optimum-quanto"}.items()),
    ("tokenizer.model", "YQ== 0", "without tokenizer.json: the package tiktoken is not installed"),
    ("tokenizer.model", "\n", "without tokenizer.json: the package sentencepiece is not installed"),
], ids=range(15))  # fmt: skip
def test_a_model_that_ranks_cannot_load_is_rejected(launch, tmp_path, name, content, message):
    needed = re.search(r"the package (\S+) is not", message)
    if needed and any(metadata.distributions(name=needed[1])):  # vLLM needs some of them
        pytest.skip(f"the package {needed[1]} is installed")
    leave_model(tmp_path)
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_text(content)
    # Quantized weights can be evaluated, but not trained.
    method = "method=evaluate" if "quantization" in content else "method=sft"
    done = launch("hardware=cpu", f"model.path={tmp_path}", method, "mode=plan")
    assert done.code == 2
    assert message.replace("{}", str(tmp_path)) in done.err


@pytest.mark.parametrize("overrides", [
    ["method=export"],
    ["hardware=mi300x", "method=evaluate", "method.args.engine=vllm"],
    ["hardware=mi300x", "container=custom", f"container.reference=mine@sha256:{'a' * 64}"],
])  # fmt: skip
def test_a_type_that_only_other_software_knows_is_accepted(launch, tmp_path, overrides):
    leave_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "qwen9"}))
    done = launch("hardware=cpu", *overrides, f"model.path={tmp_path}", "mode=plan")
    assert done.code == 0, done.err


def test_a_run_reads_the_tokenizer(launch, tmp_path):
    leave_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    done = launch("hardware=cpu", f"model.path={tmp_path}", "mode=run")
    assert done.code == 2
    assert done.err.startswith(f"{tmp_path}/tokenizer.json: damaged")
