"""Test method=export with a model of two layers."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.config.compose import compose
from launch.core.errors import UserError
from launch.core.json_files import plain
from recipes import export as recipe
from recipes.models import adapters, model_card, quantize
from recipes.models.model_build import build_model
from recipes.models.shards import INDEX, Shards, read_tensors
from recipes.rank.files import weights_sha256
from recipes.training import checkpoint
from tests.conftest import composed
from tests.helpers.exports import run_export, write_model

CONVERTER = """
import pathlib, sys
model, *options = sys.argv[1:]
assert all((pathlib.Path(model) / name).is_file() for name in ("config.json", "tokenizer.json"))
values = dict(zip(options[::2], options[1::2], strict=True))
assert sorted(values) == ["--outfile", "--outtype"], values
pathlib.Path(values["--outfile"]).write_text("GGUF " + values["--outtype"])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture
def exported(tmp_path):
    """Return a function that exports a model: (exit code, result.json, run directory)."""
    return functools.partial(run_export, tmp_path)


def greedy(folder: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "1 + 2 ="}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()


def test_export_unchanged_weights(exported, source):
    code, result, run = exported(source)
    assert (code, result["weights_error"]) == (0, 0.0)
    assert result["weights_sha256"] == weights_sha256(source)
    names = "README.md chat_template.jinja config.json generation_config.json model.safetensors"
    names = [*names.split(), "tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in (run / "model").iterdir()) == names
    assert greedy(run / "model") == greedy(source)
    assert not list(run.glob(".model*"))


@pytest.mark.parametrize(
    ("weights", "dtype", "error"),
    [("bf16", torch.bfloat16, 2**-9), ("fp16", torch.float16, 2**-12)],
)
def test_16_bits(exported, source, weights, dtype, error):
    code, result, run = exported(source, f"method.args.weights={weights}")
    written = load_file(run / "model/model.safetensors")
    assert (code, {tensor.dtype for tensor in written.values()}) == (0, {dtype})
    assert 0 < result["weights_error"] < error  # at most half of the last bit
    assert AutoModelForCausalLM.from_pretrained(run / "model").dtype == dtype


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_quantization_error_is_at_most_half_a_step(weights):
    weight = torch.randn(8, 32) * torch.logspace(-6, 3, 8)[:, None]
    weight[3] = 0
    codes, scale = quantize.quantize(weight, quantize.EIGHT_BITS[weights])
    off = (codes.float() * scale.float() - weight).abs()
    assert torch.isfinite(codes.float()).all()
    assert (scale[3].item(), codes[3].float().abs().max().item()) == (1.0, 0.0)
    largest = weight.abs().amax(1, keepdim=True)
    limit = largest * 0.5 / 127
    if weights == "fp8":  # e4m3 has three bits of mantissa
        limit = torch.maximum(weight.abs() * 2**-4, largest * 2**-10 / 448)
    # rounding the scale to bf16 affects the largest
    assert (off <= limit + largest * 2**-8).all()


def with_adapter(folder: Path, base: Path, fingerprint: str) -> tuple[Path, torch.Tensor]:
    """Save an adapter with random weights; return its folder and the model's logits."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"),
    )
    torch.manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    (folder / adapters.BASE).write_text(json.dumps({"fingerprint": fingerprint}))
    with torch.no_grad():
        return folder, model(torch.arange(12)[None]).logits


LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=8"]


def test_merge_adapter_into_base(exported, source, tmp_path):
    base = adapters.fingerprint_of_files(source)
    adapter, logits = with_adapter(tmp_path / "adapter", source, base)
    code, result, run = exported(source, *LORA, f"adapter.path={adapter}")
    assert (code, result["merge_error"] < 1e-5) == (0, True)
    names = set(load_file(source / "model.safetensors"))
    assert set(load_file(run / "model/model.safetensors")) == names
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(run / "model")(torch.arange(12)[None])
    assert torch.allclose(merged.logits, logits, atol=1e-4)


def test_chat_template_of_adapter(exported, source, tmp_path):
    adapter, _ = with_adapter(tmp_path / "adapter", source, adapters.fingerprint_of_files(source))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "of the adapter"
    tokenizer.save_pretrained(adapter)
    (tmp_path / "user.jinja").write_text("of the user")
    override = f"model.chat_template={tmp_path}/user.jinja"
    for overrides, template in (((), "of the adapter"), ((override,), "of the user")):
        _, _, run = exported(source, *LORA, f"adapter.path={adapter}", *overrides)
        assert (run / "model/chat_template.jinja").read_text() == template


def test_reject_adapter_of_another_base(exported, source, tmp_path):
    adapter, _ = with_adapter(tmp_path / "adapter", source, "another base")
    error = error_of(exported, source, *LORA, f"adapter.path={adapter}")
    assert "was trained on another base" in error


def test_gguf(exported, source, tmp_path):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(CONVERTER)
    overrides = [
        "method.args.formats=[safetensors,gguf]",
        f"method.args.gguf_converter={converter}",
    ]
    code, result, run = exported(source, *overrides, "method.args.weights=fp16")
    assert (code, result["gguf"]) == (0, str(run / "model/model.gguf"))
    assert (run / "model/model.gguf").read_text() == "GGUF f16"
    assert "llama.cpp" in (run / "model/README.md").read_text()
    converter.write_text("import sys; sys.exit('Model Qwen9 is not supported')")
    code, result, run = exported(source, *overrides)
    assert (code, (run / "model").exists()) == (1, False)
    assert "wrote no model.gguf (exit code 1): Model Qwen9 is not supported" in result["error"]


def test_converter_gets_no_secret(exported, source, tmp_path, monkeypatch):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import os, sys\nopen(sys.argv[3], 'w').write(' '.join(os.environ))\n")
    for name in ("HF_TOKEN", "MY_OWN_NAME_FOR_IT"):
        monkeypatch.setenv(name, "a secret")
    formats = "method.args.formats=[gguf]"
    _, _, run = exported(source, formats, f"method.args.gguf_converter={converter}")
    names = set((run / "model/model.gguf").read_text().split())
    assert (
        "PATH" in names <= {*recipe.CONVERTER_VARIABLES, "LC_CTYPE"}
    )  # Python sets LC_CTYPE in the C locale


def test_reject_weights(exported, source, tmp_path):
    odd = write_model(tmp_path / "odd", intermediate_size=40)
    assert "of shape (32, 40)" in error_of(exported, odd, "method.args.weights=fp8")
    _, _, eight = exported(source, "method.args.weights=int8")
    assert "already quantized (compressed-tensors)" in error_of(
        exported, eight / "model", "method.args.weights=fp8"
    )
    assert exported(eight / "model")[0] == 0  # a quantized model can be exported unchanged


def error_of(exported, model, *overrides) -> str:
    code, result, run = exported(model, *overrides)
    assert (code, (run / "model").exists()) == (2, False)
    return result["error"]


def test_reject_incomplete_model(exported, source, tmp_path):
    folder = Path(shutil.copytree(source, tmp_path / "several"))
    weights, manifest, index = (
        folder / name for name in ("model.safetensors", checkpoint.MANIFEST, INDEX)
    )
    manifest.write_text('{"files": {"model.safetensors": {"bytes": 1, "sha256": "0"}}}')
    assert "was changed: model.safetensors has" in error_of(exported, folder)
    manifest.unlink()
    content = weights.read_bytes()
    weights.rename(folder / "model-00001-of-00002.safetensors")
    assert f"{INDEX} cannot be read" in error_of(exported, folder)
    index.write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    assert "model-00002-of-00002.safetensors cannot be read" in error_of(exported, folder)
    index.unlink()
    weights.write_bytes(content[:-8])
    assert "the model is incomplete" in error_of(exported, folder)


def test_reject_model_changed_after_its_run(exported, tmp_path):
    run = tmp_path / "trained"
    write_model(run / "model")
    composition = plain(composed("hardware=cpu"))
    (run / "record.json").write_text(json.dumps({"composition": composition}))
    (run / "result.json").write_text(json.dumps({"weights_sha256": "0" * 64}))
    assert "saved by the run trained" in error_of(exported, run / "model")


@pytest.mark.parametrize(("weights", "name", "tensor", "words"), [
    ("fp16", "a", torch.full((2, 2), 1e5), "a is not finite in float16"),
    ("bf16", "a", torch.tensor([float("nan")]), "a is not finite in bfloat16"),
    ("int8", "m.layers.0.mlp.experts.up_proj.weight", torch.ones(2, 16, 16),
     "linear layer of qwen3, qwen2 or llama"),
    ("int8", "m.layers.0.mlp.gate.weight", torch.ones(16, 16),
     "linear layer of qwen3, qwen2 or llama"),
])  # fmt: skip
def test_reject_tensor(weights, name, tensor, words):
    with pytest.raises(UserError, match=re.escape(words)):
        quantize.Converter(weights)(name, tensor)


def test_several_files_with_an_index(tmp_path):
    shards = Shards(tmp_path, max_bytes=100)
    tensors = {f"t{n}": torch.full((10,), float(n)) for n in range(5)}
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.close()
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert (index["metadata"]["total_size"], index["weight_map"]["t4"]) == (200, files[2])
    # some models on the hub have such a file
    save_file({"all.in.other.names": torch.zeros(50)}, tmp_path / "consolidated.safetensors")
    assert all(torch.equal(tensors.pop(name), tensor) for name, tensor in read_tensors(tmp_path))
    assert not tensors


def test_failed_upload_leaves_model(exported, source, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    # no server uses this port
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, result, run = exported(source, "method.args.push_to=me/model")
    assert (code, result["status"], result["model"]) == (1, "failed", str(run / "model"))
    assert "me/model" in result["error"]
    assert (run / "model/model.safetensors").is_file()
    written = (run / "result.json").read_text() + (run / "model/README.md").read_text()
    assert "hf_something" not in written


def test_read_license(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for card, expected in (
        (None, None),
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: [apache-2.0, mit]\n---\n", "apache-2.0, mit"),
        ("---\nlicense: [\n---\n", None),
    ):
        if card:
            (tmp_path / "README.md").write_text(card)
        assert model_card.read_license(tmp_path) == expected
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    assert model_card.read_license(tmp_path) == "mit"


@pytest.mark.parametrize("of_the_hub", [False, True])
def test_card_has_license_of_original_model(exported, tmp_path, monkeypatch, of_the_hub):
    cached = tmp_path / "hub/models--me--base/snapshots" / ("a" * 40)
    base = write_model(cached if of_the_hub else tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: llama3.1\n---\n# A model\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cached.parents[2]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub = ["model.hub_id=me/base", f"model.revision={'a' * 40}", "model.init=pretrained"]
    overrides = hub if of_the_hub else [f"model.path={base}"]
    composition = plain(compose(["hardware=cpu", "model=tiny", *overrides]))
    trained = build_model(OmegaConf.create(composition | {"run_dir": str(tmp_path)}))
    trained.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "trained")
    _, _, run = exported(tmp_path / "trained")
    assert model_card.front_matter(run / "model/README.md")["license"] == "llama3.1"
    _, _, run = exported(tmp_path / "trained", "method.args.license=other")
    assert model_card.front_matter(run / "model/README.md")["license"] == "other"
