"""Test recipes/from_gguf.py with a small GGUF file."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes import from_gguf

HIDDEN, HEADS, LAYERS = 64, 2, 2
# Like SmolLM2's tokens: transformers chooses the wrong end token.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+=", "12", "34"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed (make gguf)"
)


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        vocab_size=len(TOKENS),
        num_attention_heads=HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def interleaved(weight):
    """Return rows of queries and keys in llama.cpp's order of rotary pairs."""
    return (
        weight.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(path, model):
    """Write the model with llama.cpp's names, matrices in Q8_0, and a BPE tokenizer of TOKENS."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["1 2", "3 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {
        f"blk.{n}.{short}": f"model.layers.{n}.{long}"
        for n in range(LAYERS)
        for short, long in parts.items()
    }
    for short, long in names.items():
        tensor = state[f"{long}.weight"]
        tensor = interleaved(tensor) if short.endswith(("attn_q", "attn_k")) else tensor
        if tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{short}.weight", gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{short}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
def test_convert_gguf_to_directory(tmp_path, capsys):
    model = small_llama()
    write_gguf(tmp_path / "small.gguf", model)
    assert from_gguf.main([str(tmp_path / "small.gguf"), str(tmp_path / "made")]) == 0
    assert f"{model.num_parameters():,} parameters in bf16" in capsys.readouterr().out
    # the staging directory is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "small.gguf"]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", use_safetensors=True)
    assert getattr(made.config, "quantization_config", None) is None
    assert made.dtype == torch.bfloat16
    for (name, actual), (expected_name, expected) in zip(
        made.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == expected_name
        # the error of Q8_0 is 1/254 of a block's largest, that of bf16 1/256
        assert (actual.float() - expected).abs().max() <= 0.02 * expected.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("1+3=<|im_end|>", add_special_tokens=False)["input_ids"] == [
        TOKENS.index(t) for t in ("1", "+", "3", "=", "<|im_end|>")
    ]


def error_of(capsys, *arguments):
    assert from_gguf.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after the warnings of transformers
    assert error.startswith("error: ")
    return error


@needs_gguf
def test_reject_damaged_file(tmp_path, capsys):
    file = tmp_path / "small.gguf"
    write_gguf(file, small_llama())
    content = file.read_bytes()
    part = content.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight")
    for damaged, words in ((content[:600], ""), (part, "model.layers.1.mlp.up_proj.weight")):
        file.write_bytes(damaged)
        assert words in error_of(capsys, file, tmp_path / "made")
        assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_reject_arguments(tmp_path, capsys, monkeypatch):
    file = tmp_path / "small.gguf"
    file.write_bytes(b"12345678{}")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    targets = [tmp_path / "made", tmp_path, tmp_path / "link", file / "made"]
    for target in targets:
        assert str(target) in error_of(capsys, file, target)
        assert not (tmp_path / "made").exists()
    error_of(capsys, tmp_path / "none.gguf", tmp_path / "made")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "make gguf" in error_of(capsys, file, tmp_path / "made")
