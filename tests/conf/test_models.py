"""Count the parameters of conf/model with transformers, and compare with what is published."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from launch.inputs import hybrid_counts
from launch.schema import Model
from recipes.models.model_build import model_config

FOLDER = Path(__file__).parents[2] / "conf/model"
MADE_HERE = {"qwen3_76m": 76_304_640}  # without a published checkpoint
NAMES = sorted(p.stem for p in FOLDER.glob("*.yaml") if p.stem not in ("auto", "tiny"))

# From model cards and checkpoints, typed independently of the files.
PUBLISHED = {
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", 596_049_920),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", 1_720_574_976),
    "qwen3_4b": ("Qwen/Qwen3-4B", 4_022_468_096),
    "qwen3_4b_base": ("Qwen/Qwen3-4B-Base", 4_022_468_096),
    "qwen3_8b": ("Qwen/Qwen3-8B", 8_190_735_360),
    "qwen3_14b": ("Qwen/Qwen3-14B", 14_768_307_200),
    "qwen3_32b": ("Qwen/Qwen3-32B", 32_762_123_264),
    "qwen2_5_1_5b": ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
    "qwen2_5_7b": ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    "llama3_1_70b": ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
    "llama3_1_405b": ("meta-llama/Llama-3.1-405B-Instruct", 405_853_388_800),
    "mistral_7b": ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552),
    "mixtral_8x7b": ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    "gpt_oss_20b": ("openai/gpt-oss-20b", 20_914_757_184),
    # 4,300,079,472 with the vision tower and its projection to the text model
    "gemma3_4b": ("google/gemma-3-4b-it", 3_880_263_168),
    "smollm2_135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
}


def load(name: str) -> Model:
    return OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Model), OmegaConf.load(FOLDER / f"{name}.yaml"))
    )


def test_every_model_has_a_published_count():
    assert set(NAMES) == {*PUBLISHED, *MADE_HERE}


@pytest.mark.parametrize("name", PUBLISHED)
def test_file_is_complete_and_its_commit_is_public_or_left_open(name):
    model = load(name)  # to_object rejects missing values
    assert (model.name, model.hub_id) == (name, PUBLISHED[name][0])
    text = (FOLDER / f"{name}.yaml").read_text()
    assert (model.revision is None) == ("unverified" in text)
    if model.revision is not None:
        assert re.search(r"revision as in \S+ of github\.com/", text)
        assert re.fullmatch("[0-9a-f]{40}", model.revision)
    assert model.num_heads % model.num_kv_heads == 0


@pytest.mark.parametrize("name", NAMES)
def test_transformers_builds_the_published_count(name):
    m = load(name)
    config = model_config(m)
    with torch.device("meta"):  # shapes without memory: 70B takes 280 GB otherwise
        built = AutoModelForCausalLM.from_config(config)
    built.tie_weights()
    count = MADE_HERE[name] if name in MADE_HERE else PUBLISHED[name][1]
    assert sum(p.numel() for p in built.parameters()) == m.num_parameters == count
    # attention_bias must match the architecture.
    assert any(n.endswith("q_proj.bias") for n, _ in built.named_parameters()) == m.attention_bias


SMALL = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 96, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MOE = {"num_experts": 4, "moe_intermediate_size": 32}
ONE_KEY_HEAD = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen3_5_text", {}),
        ("qwen3_5_text", {"tie_word_embeddings": True, "full_attention_interval": 2}),
        ("qwen3_5_moe_text", MOE),
        ("qwen3_next", MOE),
        ("gemma4_text", {}),
        ("gemma4_text", {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
        (
            "gemma4_text",
            {**ONE_KEY_HEAD, **MOE, "enable_moe_block": True, "hidden_size_per_layer_input": 0},
        ),
    ],
)
def test_layers_that_differ_are_counted(kind, keys):
    keys = {**SMALL, **keys}
    config = AutoConfig.for_model(kind, **keys, top_k_experts=2)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in built.parameters())
    assert hybrid_counts.parameters(config.to_dict()) == count  # as transformers saves it
    if kind == "gemma4_text":  # as the Hub has it
        assert hybrid_counts.parameters({"model_type": kind, **keys}) == count
