"""Compute numbers of parameters and sizes from the shape of a model."""

from dataclasses import dataclass

from launch.schema import LINEARS as LINEARS
from launch.schema import Model


@dataclass(frozen=True)
class Architecture:
    """The small parameters of a decoder layer. The matrices follow from the shape."""

    head_norms: str = ""  # norms of query and key: of each head ("head"), or of all ("width")
    norms: int = 2  # of the hidden state
    output_biases: bool = False  # of the output projection, the router and the experts
    sinks: bool = False  # one learned score per head
    tied: bool = False  # the default of tie_word_embeddings


# model_type of transformers -> its layers; a test counts all of them with transformers 5.17. Other
# types are planned as `GENERIC`.
ARCHITECTURES = {
    "gemma3_text": Architecture("head", norms=4, tied=True),
    "gpt_oss": Architecture(output_biases=True, sinks=True),
    "granite": Architecture(),
    "llama": Architecture(),
    "ministral3": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(),
    "olmo3": Architecture("width"),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture("head"),
    "qwen3_moe": Architecture("head"),
    "smollm3": Architecture(tied=True),
}
GENERIC = Architecture()


def layers_of(model: Model) -> Architecture:
    return ARCHITECTURES.get(model.architecture, GENERIC)


def is_known(model: Model) -> bool:
    """Return whether counts of this architecture are exact instead of a generic estimate."""
    return model.architecture in ARCHITECTURES


def normalizes_heads(model: Model) -> bool:
    """Return whether layers normalize queries and keys."""
    return bool(layers_of(model).head_norms)


def linear_sizes(model: Model) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers of a decoder layer, in the order of LINEARS.

    The last three are those of one expert if the model has experts.
    """
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, wide = model.hidden_size, model.intermediate_size
    return [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, wide),
        (hidden, wide),
        (wide, hidden),
    ]


def linear_parameters(model: Model, experts: int | None = None) -> int:
    """Return the number of weights in a layer's matrix products: attention, router and experts.

    `experts` is the number of experts to count, by default all of them.
    """
    counts = [i * o for i, o in linear_sizes(model)]
    if not model.num_experts:
        return sum(counts)
    experts = model.num_experts if experts is None else experts
    return sum(counts[:4]) + model.num_experts * model.hidden_size + experts * sum(counts[4:])


def active_linear_parameters(model: Model) -> int:
    """Return the weights of a layer that one token multiplies. It uses few of all experts."""
    return linear_parameters(model, model.experts_per_token)


def separate_linear_parameters(model: Model) -> int:
    """Return the weights of a layer's separate linear layers, which adapters and nf4 reach.

    transformers 5 has one tensor for all experts, which neither PEFT nor bitsandbytes replaces.
    """
    sizes = linear_sizes(model)[: 4 if model.num_experts else None]
    return sum(i * o for i, o in sizes)


def layer_parameters(model: Model) -> int:
    """Return the number of parameters of a decoder layer, with biases and norms."""
    layers, sizes = layers_of(model), linear_sizes(model)
    query, key = sizes[0][1], sizes[1][1]
    normed = {"head": 2 * model.head_dim, "width": query + key, "": 0}[layers.head_norms]
    biases = query + 2 * key if model.attention_bias else 0
    if layers.output_biases:
        expert = 2 * model.intermediate_size + model.hidden_size
        biases += model.hidden_size + model.num_experts * (1 + expert)
    small = layers.norms * model.hidden_size + normed + biases + layers.sinks * model.num_heads
    return linear_parameters(model) + small


def parameters(model: Model) -> int:
    """Return the number of parameters. A tied output head is not counted again."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return model.num_layers * layer_parameters(model) + embeddings + model.hidden_size


def active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses."""
    unused = linear_parameters(model) - active_linear_parameters(model)
    return model.num_parameters - model.num_layers * unused


def head_bytes(model: Model, width: float) -> float:
    """Return the bytes of one token's keys and values, for one head in all layers.

    `width` is the number of bytes per element.
    """
    return 2 * width * model.num_layers * model.head_dim
