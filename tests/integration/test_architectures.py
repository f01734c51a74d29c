"""Train and export a small model of each architecture that conf/model has no file for."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from launch.config.compose import compose
from launch.core.json_files import plain
from launch.plan.planning import prepare
from launch.schema.trainer_args import complete
from recipes.models.model_build import train_tokenizer
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
SHAPE |= {"max_position_embeddings": 2048}
# model_type -> additional keys. The windows are shorter than the rows.
KINDS = {
    **{kind: {} for kind in ("llama", "qwen2", "qwen3", "ministral3", "granite", "smollm3")},
    **{kind: {"sliding_window": 8} for kind in ("mistral", "phi3", "olmo3", "gemma3_text")},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
# Models with a vision tower, whose text model is trained. Three of four layers of Qwen3.5 are gated
# delta nets.
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
HYBRID |= {"linear_value_head_dim": 16, "full_attention_interval": 2}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
QWEN_TOWER |= {"out_hidden_size": SHAPE["hidden_size"]}
TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
TOWER |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GEMMA4 = {"sliding_window": 8, "global_head_dim": 32, "num_kv_shared_layers": 0}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
TOWERS = {  # model_type -> additional keys of the text, and those of the tower
    "gemma3": ({"sliding_window": 8}, TOWER),
    "gemma4": (GEMMA4, TOWER),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, TOWER),
    "qwen3_5": (HYBRID, QWEN_TOWER),
    "qwen3_5_moe": (HYBRID | EXPERTS, QWEN_TOWER),
}
MXFP4 = "gpt_oss_mxfp4"  # whose experts are packed, as those of openai/gpt-oss-20b
ALL = [*KINDS, *TOWERS, MXFP4]
AUTO = AutoModelForCausalLM, AutoModelForImageTextToText
RUNS = {  # name -> method and overrides
    "sft": ("sft", "method.args.max_steps=2 method.args.learning_rate=1e-3"),
    "lora": ("sft", "method.args.max_steps=2 method.args.learning_rate=1e-3 adapter=lora"),
    "grpo": (
        "grpo",
        "method.args.max_steps=1 method.args.max_completion_length=8 method.args.num_generations=4 "
        "method.args.learning_rate=1e-3 method.args.warmup_steps=0 "
        "~method.rewards.reasoning_gym +method.rewards.length=1",
    ),
}
COMMON = """
precision=fp32 data.num_train=16 data.num_heldout=0 topology=single
method.args.per_device_train_batch_size=4 method.args.save_strategy=no
""".split()


def configure(run_dir, method, *overrides):
    run_dir.mkdir()
    config, _ = prepare(compose(["hardware=cpu", f"method={method}", *overrides]))
    content = {"run_dir": str(run_dir), "trainer_args": complete(config, run_dir, (8000, 8001))}
    content["provenance"] = {"runs": [], "results": None}  # read by export
    OmegaConf.save(OmegaConf.create({**plain(config), **content}), run_dir / "config.yaml")
    return run_dir


def pack_experts(folder):
    """Replace the experts' weights by random codes and scales in MXFP4."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, blocks, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a directory with a model of each kind, and its runs."""
    home = tmp_path_factory.mktemp("architectures")
    tokenizer = train_tokenizer(["12 + 34 = 46"] * 4, vocab_size=512)
    for kind in ALL:
        torch.manual_seed(0)
        if kind in TOWERS:
            text, tower = TOWERS[kind]
            keys = {"text_config": SHAPE | text, "vision_config": tower}
        else:
            keys = SHAPE | KINDS[kind.removesuffix("_mxfp4")]
        shape = AutoConfig.for_model(kind.removesuffix("_mxfp4"), **keys)
        model = AUTO[kind in TOWERS].from_config(shape)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        for part in (model, tokenizer):
            part.save_pretrained(home / kind)
        if kind == MXFP4:
            pack_experts(home / kind)
        for name, (method, overrides) in RUNS.items():
            path = f"model.path={home / kind}"
            configure(home / f"{kind}-{name}", method, path, *COMMON, *overrides.split())
    return home


@pytest.mark.parametrize("name", RUNS)
def test_each_architecture_trains(home, name):
    folders = [home / f"{kind}-{name}" for kind in ALL]
    run_ranks(RUNS[name][0], *folders, num_ranks=1)
    for kind, folder in zip(ALL, folders, strict=True):
        auto = AUTO[kind in TOWERS]
        before, after = (auto.from_pretrained(f) for f in (home / kind, folder / "model"))
        states = before.state_dict(), after.state_dict()
        assert states[0].keys() == states[1].keys(), kind
        changed = {n for n, weight in states[0].items() if not weight.equal(states[1][n])}
        assert changed, kind
        assert name != "lora" or all("proj" in n or "per_layer" in n for n in changed), kind
        assert kind not in TOWERS or all(
            "language_model" in n or "lm_head" in n for n in changed
        ), kind
        if (name, kind) == ("lora", "gemma3"):  # export merges the adapter, too
            sources = f"model.path={home / kind}", f"adapter.path={folder / 'adapter'}"
            exported = configure(home / "gemma3-merged", "export", "adapter=lora", *sources)
            run_ranks("export", exported, num_ranks=1)
            merged = auto.from_pretrained(exported / "model").state_dict()
            assert all(weight.equal(merged[n]) for n, weight in states[1].items())


def test_each_architecture_is_exported(home):
    folders = [
        configure(home / f"{kind}-export", "export", f"model.path={home / kind}") for kind in ALL
    ]
    run_ranks("export", *folders, num_ranks=1)
    ids = torch.arange(4, 40)[None]
    for kind, folder in zip(ALL, folders, strict=True):
        auto = AUTO[kind in TOWERS]
        models = [auto.from_pretrained(f) for f in (home / kind, folder / "model")]
        logits = [model.float().eval()(ids).logits for model in models]
        assert torch.allclose(*logits, atol=1e-2), kind
    assert json.loads((folder / "result.json").read_text())
