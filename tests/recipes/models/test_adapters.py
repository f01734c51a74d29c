"""Test adapters on a model of one layer: merged as PEFT merges, and bound to their base."""

from __future__ import annotations

import contextlib
import copy
import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from launch import reproduce
from launch.config.request import Request
from launch.core import json_files
from launch.core.errors import EXIT_INTERRUPTED, UserError
from launch.estimate import adapted
from launch.execution import record
from launch.inputs.adapter_files import check_adapter
from launch.plan import rundir, sealed
from launch.plan.planning import make_plan
from launch.schema.shapes import LINEARS, linear_sizes
from launch.study import pipeline
from recipes.models import adapters
from recipes.models.model import adapter_config, model_config
from tests.conftest import composed, host_with


def base(dtype=torch.float32, seed=0, hidden=32):
    torch.manual_seed(seed)
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model(
        "qwen3", **shape, head_dim=16, vocab_size=64, tie_word_embeddings=True
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_adapter(model, **kind):
    """Return one that has learnt: B is zero before the first step, so merging would do nothing."""
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
def test_merging_equals_pefts(kind):
    """Merge what is saved and what a generation server is sent; the base stays unchanged."""
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


def test_the_error_of_a_merge_is_what_rounding_takes():
    model = with_adapter(base(torch.bfloat16))
    saved, error = adapters.merge(model, None)
    start, learnt, lost = dict(base(torch.bfloat16).named_parameters()), 0.0, 0.0
    for name, weight in copy.deepcopy(model).float().merge_and_unload().named_parameters():
        if name.endswith("proj.weight"):
            learnt += (weight - start[name].float()).square().sum().item()
            lost += (dict(saved.named_parameters())[name].float() - weight).square().sum().item()
    assert error == pytest.approx((lost / learnt) ** 0.5, rel=1e-3)
    assert error > 0


def test_layers_without_an_adapter_are_unpacked_too(monkeypatch):
    """Adapt some layers of a base in 4 bits: the others would be saved as packed bytes."""
    torch.manual_seed(1)
    model = get_peft_model(
        base(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    )
    packed = model.get_base_model().model.layers[0].mlp.up_proj.weight
    monkeypatch.setattr(
        adapters,
        "dequantized",
        lambda weight: (weight * 2 if weight is packed else weight).detach(),
    )
    saved, _ = adapters.merge(model, None)
    assert torch.equal(saved.model.layers[0].mlp.up_proj.weight, packed * 2)


def test_adapters_of_embeddings_are_rejected():
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(UserError, match="embed_tokens"):
        adapters.merge(get_peft_model(base(), config), None)


def settings(path, **adapter):
    own = {
        "rank": 4,
        "alpha": 8,
        "rslora": False,
        "dora": False,
        "dropout": 0.0,
        "path": str(path),
        **adapter,
    }
    return OmegaConf.create(
        {
            "adapter": own,
            "model": {"path": None, "name": "tiny"},
            "topology": {"strategy": "none"},
        }
    )


@pytest.fixture
def adapter_dir(tmp_path):
    start = base()
    fingerprint = adapters.fingerprint_of(start)
    with_adapter(start).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/base.json").write_text(json.dumps({"fingerprint": fingerprint}))
    return tmp_path / "adapter"


def test_loaded_adapters_are_trainable(adapter_dir):
    model = adapters.load_adapter(
        base(), settings(adapter_dir, dropout=0.25), adapters.fingerprint_of(base())
    )
    dropouts = {m.p for n, m in model.named_modules() if n.endswith("lora_dropout.default")}
    assert dropouts == {0.25}
    reference = dict(with_adapter(base()).named_parameters())
    assert all(torch.equal(weight, reference[name]) for name, weight in model.named_parameters())
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        name for name in reference if "lora_" in name
    }


def test_adapters_of_another_base_are_rejected(adapter_dir):
    with pytest.raises(UserError, match="another base than model=tiny"):
        adapters.load_adapter(
            base(seed=5), settings(adapter_dir), adapters.fingerprint_of(base(seed=5))
        )


def test_a_fingerprint_is_that_of_the_files_and_of_any_precision(tmp_path):
    base().save_pretrained(tmp_path)
    assert (
        adapters.fingerprint_of_files(tmp_path)
        == adapters.fingerprint_of(base())
        == adapters.fingerprint_of(base(torch.bfloat16))
    )
    assert adapters.fingerprint_of(base(seed=5)) != adapters.fingerprint_of(base())


def test_checkpoints_of_another_base_are_not_resumed(tmp_path):
    for _ in range(2):
        adapters.note_base(tmp_path, "one")
    with pytest.raises(UserError, match="trained on other base weights"):
        adapters.note_base(tmp_path, "two")


def test_the_launcher_rejects_adapters_that_do_not_fit(adapter_dir):
    def config_with(path, *overrides):
        config = copy.deepcopy(
            composed(
                "hardware=cpu",
                "model=tiny",
                "adapter=lora",
                "adapter.rank=4",
                "adapter.alpha=8",
                *overrides,
            )
        )
        config.adapter.path = str(path)
        return config

    with pytest.raises(
        UserError, match="belongs to another base: .* is of size 48, and model=tiny has"
    ):
        check_adapter(config_with(adapter_dir))
    with pytest.raises(UserError, match=r"adapter.alpha=9: .* has 8. Use: adapter.alpha=8"):
        check_adapter(config_with(adapter_dir, "adapter.alpha=9"))
    (adapter_dir / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="cannot be read"):
        check_adapter(config_with(adapter_dir))
    (adapter_dir / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        check_adapter(config_with(adapter_dir))


@pytest.mark.parametrize(
    ("own", "override", "message"),
    [
        ({"alpha_pattern": {"q_proj": 64}}, "seed=1", "has alpha_pattern="),
        ({"bias": "all"}, "seed=1", "has bias=all"),
        (
            {},
            "adapter.target_modules=[q_proj]",
            r"adapter.target_modules=\[q_proj\]: .* has its own layers",
        ),
        ({"use_dora": True}, "seed=1", "Use: adapter.dora=true"),
        ([], "seed=1", "holds no JSON object"),
    ],
)
def test_the_launcher_rejects_adapters_with_other_settings(tmp_path, own, override, message):
    content = (
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], **own}
        if isinstance(own, dict)
        else own
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = copy.deepcopy(
        composed(
            "hardware=cpu",
            "model=tiny",
            "adapter=lora",
            "adapter.rank=4",
            "adapter.alpha=8",
            override,
        )
    )
    config.adapter.path = str(tmp_path)
    with pytest.raises(UserError, match=message):
        check_adapter(config)


@pytest.mark.parametrize("layers", ["all-linear", "[v_proj,down_proj]"])
def test_the_planner_counts_what_peft_trains(layers):
    """Count for model=tiny, whose shape the launcher has too."""
    config = composed(
        "hardware=cpu", "model=tiny", "adapter=lora", f"adapter.target_modules={layers}"
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_config(model_config(config.model)),
        adapter_config(OmegaConf.structured(config)),
    )
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == adapted.trainable_parameters(config.model, config.adapter)


@pytest.mark.parametrize(
    ("listed", "on"),
    [
        (["self_attn.q_proj"], ["q_proj"]),
        ("q_proj|k_proj", LINEARS),
        (None, LINEARS),
    ],
)
def test_the_planner_counts_the_layers_of_the_adapter_that_is_trained_on(listed, on, tmp_path):
    """Count all seven for a regular expression, and for files that do not exist yet."""
    if listed:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": listed}))
    config = composed("hardware=cpu", "model=tiny", "adapter=lora", f"adapter.path={tmp_path}")
    assert adapted.layers(config.adapter) == [*on]
    sizes = dict(zip(LINEARS, linear_sizes(config.model), strict=True))
    trained = adapted.trainable_parameters(config.model, config.adapter)
    assert trained == config.model.num_layers * config.adapter.rank * sum(
        sum(sizes[name]) for name in on
    )


def test_merged_weights_are_sent_only_for_adapters():
    from recipes.sampling.serving import send_merged

    engine = SimpleNamespace(
        model=with_adapter(base()),
        _dist=SimpleNamespace(gather_params=lambda _: contextlib.nullcontext()),
    )
    send_merged(SimpleNamespace(vllm_generation=engine))
    assert {name for name, _ in engine._iter_named_params()} == set(dict(base().named_parameters()))
    plain = SimpleNamespace(model=base())
    send_merged(SimpleNamespace(vllm_generation=plain))
    assert not hasattr(plain, "_iter_named_params")


def test_runs_identify_adapters_by_content(tmp_path, capsys, monkeypatch):
    """Resume only with that adapter, as a pipeline does; reproducing names what differs."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    )
    weights.write_bytes((2).to_bytes(8, "little") + b"{}")
    lora = ["adapter=lora", "adapter.rank=4", "adapter.alpha=8", f"adapter.path={folder}"]
    overrides = ["hardware=cpu", "model=tiny", *lora, f"run_root={tmp_path}/runs", "name=n"]
    plan = make_plan(
        composed(*overrides), host_with(0), tmp_path / "runs/n/1", request=Request(overrides)
    )
    entry, before = record.begin(plan, host_with(0), None, None), json_files.sha256(weights)
    json_files.write_json(
        plan.run_dir / "record.json", sealed.seal({**entry, "status": "interrupted"})
    )
    phases = [*overrides, "phases=[{name: a}, {name: b, model_from: a}]"]
    plans = pipeline.make_plans(composed(*phases), Request(phases), host_with(0), tmp_path / "2")
    of_all = pipeline.input_data(tmp_path / "2", list(plans.values()))
    assert entry["model"]["adapter"] == {
        str(file): json_files.sha256(file) for file in sorted(folder.iterdir())
    }
    assert rundir.choose(plan.config) == (plan.run_dir, True)
    weights.write_bytes((3).to_bytes(8, "little") + b"{ }")
    assert rundir.changed_data(entry) == rundir.changed_data({"data": of_all}) == [str(weights)]
    assert rundir.choose(plan.config)[1] is False
    with pytest.raises(
        UserError, match=r"adapter/adapter_model\.safetensors changed since that run began"
    ):
        rundir.choose(composed(*overrides, f"resume={plan.run_dir}"))
    monkeypatch.setattr(reproduce, "check_host", lambda plan, host: None)
    monkeypatch.setattr(reproduce, "execute", lambda *args, **kwargs: EXIT_INTERRUPTED)
    reproduce.reproduce_one(plan.run_dir, entry, [])
    assert (
        f"model.adapter.{weights}: {before} -> {json_files.sha256(weights)}"
        in capsys.readouterr().out
    )
