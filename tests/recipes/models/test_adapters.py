"""Test adapters on a model of one layer: merging, and the check of the base."""

from __future__ import annotations

import contextlib
import copy
import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch.core.errors import UserError
from launch.estimate import adapter_layers
from recipes.models import adapters
from recipes.models.model_build import adapter_config, model_config
from tests.conftest import composed
from tests.helpers.small_models import small_model


def base(dtype=torch.float32, seed=0):
    return small_model(seed=seed, dtype=dtype, tie_word_embeddings=True)


def with_adapter(model, **kind):
    """Return an adapter with random B, since merging with the initial B of zero does nothing."""
    torch.manual_seed(1)
    adapted = get_peft_model(
        model,
        LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", **kind),
    )
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
        elif "magnitude" in name:
            weight.data *= 1.1
    return adapted


KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_equal_pefts(kind):
    """Merge for export and for a generation server, without changing the base."""
    model = with_adapter(base(), **KINDS[kind])
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    sent = dict(adapters.merged_params(model, lambda _: contextlib.nullcontext()))
    saved, error = adapters.merge(model, None)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    reference = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert set(sent) == set(reference) == set(dict(saved.named_parameters()))
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(weight, reference[name], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sent[name], reference[name], atol=1e-6, rtol=1e-5)
    assert error == 0.0
    assert saved.lm_head.weight is saved.model.embed_tokens.weight


def test_the_error_of_a_merge_is_the_rounding():
    model = with_adapter(base(torch.bfloat16))
    saved, error = adapters.merge(model, None)
    start, learnt, lost = dict(base(torch.bfloat16).named_parameters()), 0.0, 0.0
    for name, weight in copy.deepcopy(model).float().merge_and_unload().named_parameters():
        if name.endswith("proj.weight"):
            learnt += (weight - start[name].float()).square().sum().item()
            lost += (dict(saved.named_parameters())[name].float() - weight).square().sum().item()
    assert error == pytest.approx((lost / learnt) ** 0.5, rel=1e-3)
    assert error > 0


def test_layers_without_an_adapter_are_dequantized(monkeypatch):
    """Otherwise layers of a 4-bit base without an adapter would be saved as packed bytes."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    model = get_peft_model(base(), config)
    packed = model.get_base_model().model.layers[0].mlp.up_proj.weight
    doubled = lambda weight: (weight * 2 if weight is packed else weight).detach()  # noqa: E731
    monkeypatch.setattr(adapters, "dequantize", doubled)
    saved, _ = adapters.merge(model, None)
    assert torch.equal(saved.model.layers[0].mlp.up_proj.weight, packed * 2)


@pytest.mark.parametrize(("kind", "values", "modules", "name"), [
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 4}, ["embed_tokens"], "embed_tokens"),
    ("gpt2", {}, "all-linear", "c_attn is of the class Conv1D"),
    ("mixtral", {"num_key_value_heads": 1, "head_dim": 4}, "all-linear", "mlp"),
])  # fmt: skip
def test_adapters_of_layers_that_are_not_linear_are_rejected(kind, values, modules, name):
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **values))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules)
    with pytest.raises(UserError, match=name):
        adapters.check_mergeable(get_peft_model(model, config))


def settings(path, dropout=0.0):
    adapter = {"rank": 4, "alpha": 8, "rslora": False, "dora": False}
    adapter |= {"dropout": dropout, "path": str(path)}
    model = {"path": None, "name": "tiny"}
    return OmegaConf.create({"adapter": adapter, "model": model, "topology": {"strategy": "none"}})


@pytest.fixture
def adapter_dir(tmp_path):
    start = base()
    fingerprint = adapters.fingerprint_of(start)
    with_adapter(start).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/base.json").write_text(json.dumps({"fingerprint": fingerprint}))
    return tmp_path / "adapter"


def test_loaded_adapters_are_trainable(adapter_dir):
    start = base()
    fingerprint = adapters.fingerprint_of(start)
    model = adapters.load_adapter(start, settings(adapter_dir, dropout=0.25), fingerprint)
    dropouts = {m.p for n, m in model.named_modules() if n.endswith("lora_dropout.default")}
    assert dropouts == {0.25}
    reference = dict(with_adapter(base()).named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, reference[name])
        assert weight.requires_grad == ("lora_" in name)


def test_adapters_of_another_base_are_rejected(adapter_dir):
    other = base(seed=5)
    with pytest.raises(UserError, match="another base than model=tiny"):
        adapters.load_adapter(other, settings(adapter_dir), adapters.fingerprint_of(other))


def test_adapters_of_other_layers_are_rejected(adapter_dir):
    (adapter_dir / "base.json").unlink()
    weights = adapter_dir / "adapter_model.safetensors"
    tensors = load_file(weights)
    dropped = next(name for name in sorted(tensors) if "lora_B" in name)
    save_file({name: t for name, t in tensors.items() if name != dropped}, weights)
    with pytest.raises(UserError, match=f"other layers than model=tiny has: {dropped}"):
        adapters.load_adapter(base(), settings(adapter_dir), adapters.fingerprint_of(base()))


def test_files_and_models_of_any_precision_have_one_fingerprint(tmp_path):
    base().save_pretrained(tmp_path)
    half, other = base(torch.bfloat16), base(seed=5)
    fingerprint = adapters.fingerprint_of_files(tmp_path)
    assert fingerprint == adapters.fingerprint_of(base()) == adapters.fingerprint_of(half)
    assert fingerprint != adapters.fingerprint_of(other)


def test_checkpoints_of_another_base_are_rejected(tmp_path):
    for _ in range(2):
        adapters.record_base(tmp_path, "one")
    with pytest.raises(UserError, match="trained on other base weights"):
        adapters.record_base(tmp_path, "two")


@pytest.mark.parametrize("layers", ["all-linear", "[v_proj,down_proj]"])
def test_the_planner_counts_the_parameters_that_peft_trains(layers):
    """Compare counts for model=tiny, whose shape the launcher knows."""
    target = f"adapter.target_modules={layers}"
    config = composed("hardware=cpu", "model=tiny", "adapter=lora", target)
    model = OmegaConf.structured(config.model)
    whole = AutoModelForCausalLM.from_config(model_config(model))
    model = get_peft_model(whole, adapter_config(OmegaConf.structured(config)))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == adapter_layers.trainable_parameters(config.model, config.adapter)


def test_merged_weights_are_sent_only_for_adapters():
    from recipes.sampling.serving import send_merged_weights

    gather = SimpleNamespace(gather_params=lambda _: contextlib.nullcontext())
    engine = SimpleNamespace(model=with_adapter(base()), _dist=gather)
    send_merged_weights(SimpleNamespace(vllm_generation=engine))
    assert {name for name, _ in engine._iter_named_params()} == set(dict(base().named_parameters()))
    plain = SimpleNamespace(model=base())
    send_merged_weights(SimpleNamespace(vllm_generation=plain))
    assert not hasattr(plain, "_iter_named_params")
