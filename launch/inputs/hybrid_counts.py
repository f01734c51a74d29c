"""Count the parameters of models whose layers differ, from the values in config.json.

Formulas follow the classes of transformers 5.17. A test compares the counts.
"""

from __future__ import annotations

from typing import Any

FULL = "full_attention"
Values = dict[str, Any]


def parameters(values: Values) -> int | None:
    """Return the number of parameters; None if the type has no formula here."""
    if (kind := values.get("model_type")) not in LAYERS:
        return None
    values = DEFAULTS[kind] | {key: value for key, value in values.items() if value is not None}
    count, hidden = values["num_hidden_layers"], values["hidden_size"]
    every = values["full_attention_interval"]
    types = values.get("layer_types") or ["" if n % every else FULL for n in range(1, count + 1)]
    layers = sum(LAYERS[kind](values, n, types[n] == FULL) for n in range(count))
    # Gemma 4 has an embedding for each layer.
    inputs = values.get("hidden_size_per_layer_input", 0)
    width = count * inputs
    layers += width * (values.get("vocab_size_per_layer_input", 0) + hidden) + inputs
    embeddings = values["vocab_size"] * hidden * (1 if values["tie_word_embeddings"] else 2)
    return int(layers + embeddings + hidden)


def _qwen_layer(v: Values, _: int, full: bool) -> int:
    """Count a layer of attention with an output gate, or of a gated delta net."""
    hidden = v["hidden_size"]
    if full:
        query, key = (v[name] * v["head_dim"] for name in ("num_attention_heads", HEADS))
        mixer = hidden * (3 * query + 2 * key) + 2 * v["head_dim"]
    else:
        heads = v["linear_num_value_heads"]
        key = v["linear_num_key_heads"] * v["linear_key_head_dim"]
        value = heads * v["linear_value_head_dim"]
        mixed = 2 * key + value
        mixer = hidden * (mixed + 2 * value + 2 * heads) + mixed * v["linear_conv_kernel_dim"]
        mixer += 2 * heads + v["linear_value_head_dim"]
    if experts := v.get("num_experts"):
        wide = experts * v["moe_intermediate_size"] + v["shared_expert_intermediate_size"]
        return int(mixer + 3 * hidden * wide + hidden * (experts + 1) + 2 * hidden)
    return int(mixer + 3 * hidden * v["intermediate_size"] + 2 * hidden)


def _gemma4_layer(v: Values, layer: int, full: bool) -> int:
    """Count a layer. The last `num_kv_shared_layers` have no keys and values of their own."""
    hidden, inputs = v["hidden_size"], v["hidden_size_per_layer_input"]
    full = full or layer == v["num_hidden_layers"] - 1
    shared = layer >= v["num_hidden_layers"] - v["num_kv_shared_layers"]
    is_value_key = full and v["attention_k_eq_v"]  # keys serve as values
    own = {"head_dim": v["global_head_dim"]} if full else {}
    if is_value_key and "num_global_key_value_heads" in v:
        own[HEADS] = v["num_global_key_value_heads"]
    own = (v.get("per_layer_config") or {str(layer): own}).get(str(layer), {})  # in saved files
    head, heads = own.get("head_dim", v["head_dim"]), own.get(HEADS, v[HEADS])
    attention = 2 * hidden * v["num_attention_heads"] * head + head
    if not shared:
        attention += hidden * heads * head * (1 if is_value_key else 2) + head
    wide = v["intermediate_size"] * (2 if shared and v["use_double_wide_mlp"] else 1)
    count = attention + 3 * hidden * wide + 4 * hidden
    count += 2 * hidden * inputs + hidden if inputs else 0
    if v["enable_moe_block"]:
        experts = v["num_experts"]
        count += experts * (3 * hidden * v["moe_intermediate_size"] + hidden + 1) + 4 * hidden
    return int(count)


HEADS = "num_key_value_heads"
QWEN = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False}
DEFAULTS: dict[str, Values] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), QWEN),
    "gemma4_text": {
        "full_attention_interval": 6,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"), False),
    },
}
LAYERS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _qwen_layer),
    "gemma4_text": _gemma4_layer,
}
