"""Test method=export on two layers: what is written, loaded and lost, and each rejection."""

from __future__ import annotations

import functools
import json
import re
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
from recipes.models.shards import INDEX, Shards, stored
from recipes.rank.files import weights_sha256
from recipes.training import checkpoint
from tests.conftest import composed
from tests.helpers.exports import run_export, write_model

CONVERTER = """
import pathlib, sys
model, *options = sys.argv[1:]
assert all((pathlib.Path(model) / name).is_file() for name in ("config.json", "tokenizer.json"))
given = dict(zip(options[::2], options[1::2], strict=True))
assert sorted(given) == ["--outfile", "--outtype"], given
pathlib.Path(given["--outfile"]).write_text("GGUF " + given["--outtype"])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture
def exported(tmp_path):
    """Return `exported(model, ...)`, which gives (exit code, result.json, run directory)."""
    return functools.partial(run_export, tmp_path)


def greedy(folder: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "1 + 2 ="}]
    given = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(**given, max_new_tokens=8, do_sample=False)[0].tolist()


def test_weights_as_they_are_load_and_answer_as_before(exported, source):
    code, result, run = exported(source)
    assert (code, result["weights_error"], result["weights_sha256"]) == (
        0,
        0.0,
        weights_sha256(source),
    )
    names = (
        "README.md chat_template.jinja config.json generation_config.json "
        "model.safetensors tokenizer.json"
    ).split()
    assert sorted(p.name for p in (run / "model").iterdir()) == [*names, "tokenizer_config.json"]
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
    assert 0 < result["weights_error"] < error  # half of the last bit, and less on average
    assert AutoModelForCausalLM.from_pretrained(run / "model").dtype == dtype


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_a_code_is_off_by_half_a_step_at_most_and_zeros_stay(weights):
    bits = quantize.EIGHT_BITS[weights]
    weight = torch.randn(8, 32) * torch.logspace(-6, 3, 8)[:, None]
    weight[3] = 0
    codes, scale = quantize.quantized(weight, bits)
    off = (codes.float() * scale.float() - weight).abs()
    assert torch.isfinite(codes.float()).all()
    assert (scale[3].item(), codes[3].float().abs().max().item()) == (1.0, 0.0)
    largest = weight.abs().amax(1, keepdim=True)
    half = 0.5 / 127 if weights == "int8" else 2**-4  # of e4m3's three bits of mantissa
    limit = (
        largest * half
        if weights == "int8"
        else torch.maximum(weight.abs() * half, largest * 2**-10 / 448)
    )
    assert (
        off <= limit + largest * 2**-8
    ).all()  # and a scale that is rounded in bf16 cuts the largest


def test_an_export_is_the_same_twice(exported, source):
    hashes = [exported(source, "method.args.weights=fp8")[1]["weights_sha256"] for _ in range(2)]
    assert hashes[0] == hashes[1]


def with_adapter(folder: Path, base: Path, fingerprint: str) -> tuple[Path, torch.Tensor]:
    """Save an adapter that has learnt something; return what the base answers with it."""
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


def test_an_adapter_is_merged_into_its_base(exported, source, tmp_path):
    adapter, logits = with_adapter(
        tmp_path / "adapter", source, adapters.fingerprint_of_files(source)
    )
    code, result, run = exported(source, *LORA, f"adapter.path={adapter}")
    assert (code, result["merge_error"] < 1e-5) == (0, True)
    assert set(load_file(run / "model/model.safetensors")) == set(
        load_file(source / "model.safetensors")
    )
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(run / "model")(torch.arange(12)[None]).logits
    assert torch.allclose(found, logits, atol=1e-4)


def test_an_adapter_brings_the_chat_template_that_it_was_trained_with(exported, source, tmp_path):
    adapter, _ = with_adapter(tmp_path / "adapter", source, adapters.fingerprint_of_files(source))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "of its training"
    tokenizer.save_pretrained(adapter)
    (tmp_path / "given.jinja").write_text("given now")
    given = [*LORA, f"adapter.path={adapter}"]
    assert (
        exported(source, *given)[2] / "model/chat_template.jinja"
    ).read_text() == "of its training"
    _, _, run = exported(source, *given, f"model.chat_template={tmp_path}/given.jinja")
    assert (run / "model/chat_template.jinja").read_text() == "given now"


def test_an_adapter_of_another_base_is_refused(exported, source, tmp_path):
    adapter, _ = with_adapter(tmp_path / "adapter", source, "that of another")
    code, result, run = exported(source, *LORA, f"adapter.path={adapter}")
    assert (code, (run / "model").exists()) == (2, False)
    assert "was trained on another base" in result["error"]


def test_gguf_by_a_converter(exported, source, tmp_path):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(CONVERTER)
    given = ["method.args.formats=[safetensors,gguf]", f"method.args.gguf_converter={converter}"]
    code, result, run = exported(source, *given, "method.args.weights=fp16")
    assert (code, result["gguf"]) == (0, str(run / "model/model.gguf"))
    assert (run / "model/model.gguf").read_text() == "GGUF f16"
    assert "llama.cpp" in (run / "model/README.md").read_text()
    converter.write_text("import sys; sys.exit('Model Qwen9 is not supported')")
    code, result, run = exported(source, *given)
    assert (code, (run / "model").exists()) == (1, False)
    assert "wrote no model.gguf (exit code 1): Model Qwen9 is not supported" in result["error"]


def test_a_converter_gets_no_secret(exported, source, tmp_path, monkeypatch):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[3]).write_text(' "
        "'.join(sorted(os.environ)))\n"
    )
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN_NAME_FOR_IT"):
        monkeypatch.setenv(name, "a secret")
    _, _, run = exported(
        source, "method.args.formats=[gguf]", f"method.args.gguf_converter={converter}"
    )
    given = set((run / "model/model.gguf").read_text().split())
    assert "PATH" in given
    assert given <= {*recipe.PASSED_ON, "LC_CTYPE"}  # Python's own, of the C locale


def test_refused_by_the_rank(exported, source, tmp_path):
    odd = write_model(tmp_path / "odd", intermediate_size=40)
    assert "of shape (32, 40)" in refused(exported, odd, "method.args.weights=fp8")
    _, _, eight = exported(source, "method.args.weights=int8")
    assert "quantized already (compressed-tensors)" in refused(
        exported, eight / "model", "method.args.weights=fp8"
    )
    assert exported(eight / "model")[0] == 0  # unchanged, a quantized model is exported


def refused(exported, model, *overrides) -> str:
    code, result, run = exported(model, *overrides)
    assert (code, (run / "model").exists()) == (2, False)
    return result["error"]


def test_a_model_that_is_not_whole_is_refused(exported, source, tmp_path):
    folder = tmp_path / "several"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    checkpoint.write_json(
        folder / checkpoint.MANIFEST, {"files": {"model.safetensors": {"bytes": 1, "sha256": "0"}}}
    )
    assert "is incomplete or was changed: model.safetensors has" in refused(exported, folder)
    (folder / checkpoint.MANIFEST).unlink()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.rename(folder / "model-00001-of-00002.safetensors")
    assert f"{INDEX} cannot be read, so the model is incomplete" in refused(exported, folder)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
    )
    assert "model-00002-of-00002.safetensors cannot be read" in refused(exported, folder)
    (folder / INDEX).unlink()
    weights.write_bytes(content[:-8])
    assert "cannot be read, so the model is incomplete" in refused(exported, folder)


def test_a_model_that_differs_from_what_its_run_left_is_refused(exported, tmp_path):
    run = tmp_path / "trained"
    write_model(run / "model")
    composition = plain(composed("hardware=cpu"))
    (run / "record.json").write_text(json.dumps({"composition": composition}))
    (run / "result.json").write_text(json.dumps({"weights_sha256": "0" * 64}))
    assert "its weights differ from those that run trained saved" in refused(
        exported, run / "model"
    )


@pytest.mark.parametrize(("weights", "name", "tensor", "words"), [
    ("fp16", "a", torch.full((2, 2), 1e5), "a is not finite in float16"),
    ("bf16", "a", torch.tensor([float("nan")]), "a is not finite in bfloat16"),
    ("int8", "m.layers.0.mlp.experts.up_proj.weight", torch.ones(2, 16, 16),
     "linear layer of qwen3, qwen2 or llama"),
    ("int8", "m.layers.0.mlp.gate.weight", torch.ones(16, 16),
     "linear layer of qwen3, qwen2 or llama"),
])  # fmt: skip
def test_weights_that_do_not_fit(weights, name, tensor, words):
    with pytest.raises(UserError, match=re.escape(words)):
        quantize.Converter(weights)(name, tensor)


def test_several_files_with_an_index(tmp_path):
    shards = Shards(tmp_path, most=100)
    given = {f"t{n}": torch.full((10,), float(n)) for n in range(5)}
    for name, tensor in given.items():
        shards.add(name, tensor)
    shards.close()
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert (index["metadata"]["total_size"], index["weight_map"]["t4"]) == (200, files[2])
    # as some models of the hub have
    save_file({"all.in.other.names": torch.zeros(50)}, tmp_path / "consolidated.safetensors")
    assert {name: tensor.tolist() for name, tensor in stored(tmp_path)} == {
        name: tensor.tolist() for name, tensor in given.items()
    }


# ---- The hub


def test_nothing_is_pushed_unasked_and_a_hub_that_is_not_there_leaves_the_model(
    exported, source, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_something")
    # nothing listens there
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, result, _ = exported(source)
    assert (code, "pushed_to" in result) == (0, False)
    code, result, run = exported(source, "method.args.push_to=me/model")
    assert (code, result["status"], result["model"]) == (1, "failed", str(run / "model"))
    assert "me/model" in result["error"]
    assert (run / "model/model.safetensors").is_file()
    assert (
        "hf_something"
        not in (run / "result.json").read_text() + (run / "model/README.md").read_text()
    )


# ---- The card


def test_a_licence_is_never_invented(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for card, licence in (
        (None, None),
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: [apache-2.0, mit]\n---\n", "apache-2.0, mit"),
        ("---\nlicense: [\n---\n", None),
    ):
        if card:
            (tmp_path / "README.md").write_text(card)
        assert model_card.stated_license(tmp_path) == licence
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    assert model_card.stated_license(tmp_path) == "mit"


@pytest.mark.parametrize("of_the_hub", [False, True])
def test_the_licence_of_the_model_that_was_trained_stands_on_the_card(
    exported, tmp_path, monkeypatch, of_the_hub
):
    """Save what a training begins with under its card's licence, from run to run."""
    cached = tmp_path / "hub/models--me--base/snapshots" / ("a" * 40)
    base = write_model(cached if of_the_hub else tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: llama3.1\n---\n# A model\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cached.parents[2]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    given = (
        ["model.hub_id=me/base", f"model.revision={'a' * 40}", "model.init=pretrained"]
        if of_the_hub
        else [f"model.path={base}"]
    )
    trained = build_model(
        OmegaConf.create(
            plain(compose(["hardware=cpu", "model=tiny", *given])) | {"run_dir": str(tmp_path)}
        )
    )
    trained.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "trained")
    _, _, run = exported(tmp_path / "trained")
    assert model_card.front_matter(run / "model/README.md")["license"] == "llama3.1"
    _, _, run = exported(tmp_path / "trained", "method.args.license=other")
    assert model_card.front_matter(run / "model/README.md")["license"] == "other"
