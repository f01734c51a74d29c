"""Test models with a vision tower, whose text model is trained, with vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from recipes.models.model_build import train_tokenizer
from tests.conftest import ROOT, command
from tests.integration.conftest import TESTS_CACHE, skip_without
from tests.integration.test_architectures import SHAPE, TOWERS

pytestmark = pytest.mark.integration
# vLLM imports the towers' image processors. PyPI's torchvision needs CUDA for its operators, which
# nothing here calls.
TORCHVISION = "torchvision==0.28.0"
OPERATORS = """\
import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
HYBRIDS = ("qwen3_5", "qwen3_5_moe")  # one of two layers is a gated delta net
# Sizes that vLLM's kernels for the CPU support
SIZES = dict.fromkeys(HYBRIDS, {"linear_key_head_dim": 128, "linear_value_head_dim": 128})
IMAGES = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor"},
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor"},
    "mistral3": {"image_processor_type": "PixtralImageProcessor"},
    **dict.fromkeys(HYBRIDS, {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2}),
}
IDS = list(range(4, 40))


@pytest.fixture(scope="module")
def with_torchvision() -> Iterator[None]:
    """Give vLLM torchvision's Python files."""
    if importlib.util.find_spec("vllm") is None:
        skip_without("no vLLM (make vllm)")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            patch.setenv("PYTHONPATH", str(unpacked()))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def unpacked() -> Path:
    """Return a directory with torchvision, downloaded once."""
    folder = TESTS_CACHE / TORCHVISION.replace("==", "-")
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(unfinished), TORCHVISION], check=True)
        (unfinished / "sitecustomize.py").write_text(OPERATORS)
        unfinished.rename(folder)
    return folder


def write_model(folder: Path, kind: str) -> Path:
    text, tower = TOWERS[kind]
    text = SHAPE | text | {"head_dim": 32} | SIZES.get(kind, {})
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, text_config=text, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(shape)
    tokenizer = train_tokenizer(["12 + 34 = 46"] * 4, vocab_size=512)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES[kind]))
    return folder


def compare(dtype: str, folder: str) -> None:
    """Print the largest error of vLLM's log-probabilities, and how much they differ."""
    ids = torch.tensor([IDS])
    logits = AutoModelForImageTextToText.from_pretrained(folder).float()(ids).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze()

    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=64,
        language_model_only=True,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    found = [next(iter(token.values())).logprob for token in output.prompt_logprobs[1:]]
    error = (torch.tensor(found) - expected).abs().max()
    print(json.dumps([error.item(), expected.std().item()]))


def compared(dtype: str, folder: Path) -> list[float]:
    call = f"compare({dtype!r}, {str(folder)!r})"
    program = f"from tests.integration.test_vision_towers import compare; {call}"
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "recipes/smoke")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SPLIT = """
hardware=cpu method=grpo topology=split hardware.vllm=true hardware.gpus_per_node=2
topology.num_gpus=2 topology.server_max_length=256 precision=fp32 data.num_train=16
data.num_heldout=0 method.args.max_steps=2 method.args.max_completion_length=8
method.args.num_generations=4 method.args.per_device_train_batch_size=4
method.args.learning_rate=1e-2 method.args.warmup_steps=0 tracking=none
~method.rewards.reasoning_gym +method.rewards.length=1
""".split()


def test_server_gets_the_weights_and_vllm_loads_the_result(with_torchvision, tmp_path):
    source = write_model(tmp_path / "gemma3", "gemma3")
    done = command(*SPLIT, f"model.path={source}", "name=grpo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights reach the server: " in done.stdout + done.stderr
    trained = tmp_path / "runs/grpo/latest/model"
    error, spread = compared("float32", trained)
    assert error < 1e-5 < spread
    states = [
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (source, trained)
    ]
    changed = {name for name, weight in states[0].items() if not weight.equal(states[1][name])}
    assert changed
    assert all("language_model" in name or "lm_head" in name for name in changed)


@pytest.mark.parametrize("kind", ["gemma4", "mistral3", *HYBRIDS])
def test_vllm_loads_an_exported_model(kind, with_torchvision, tmp_path):
    source = write_model(tmp_path / kind, kind)
    done = command("method=export", f"model.path={source}", "name=export", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # vLLM computes gated delta nets in bf16 on a CPU.
    dtype, share = ("bfloat16", 0.1) if kind in HYBRIDS else ("float32", 1e-4)
    error, spread = compared(dtype, tmp_path / "runs/export/latest/model")
    assert error < share * spread
