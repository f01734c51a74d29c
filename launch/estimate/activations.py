"""Count the bytes of activations and logits in a micro-step.

These are the tensors that autograd saves per layer, and those that each part of a step adds. The
counts come from the models of transformers 5.17 (qwen3, qwen2, llama), run layer by layer in eager
mode with fused attention. The head of TRL 1.16 computes log-probabilities in tiles, so it never
stores all logits. `tests/gpu/predictions.py` compares the counts with a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launch.estimate.adapter_layers import ATTENTION, DOWN, AdapterLayers
from launch.estimate.batch_counts import Batch
from launch.schema import Config, Model
from launch.schema.enums import Head, Rows
from launch.schema.shapes import layers_of, linear_parameters, normalizes_heads
from launch.schema.trainer_args import value, value_or_none

# bytes per weight; nf4 has 4 bits, and an fp32 scale per 64 weights (arXiv:2305.14314)
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "nf4": 0.5625}
SHARDED = ("fsdp", "zero2", "zero3")
# tokens and vocabulary entries in a tile of TRL's head; our head processes all entries of a token
# (recipes/models/head.py)
TILE = (4096, 32768)
# Without Triton, a head's statistics and gradients are computed in torch, for this many logits at
# a time (recipes/models/head.py), with these bytes per logit in temporary tensors.
FOLDED, FOLDED_BYTES = 2**23, 33
# bytes; a head of log-probabilities stores gradients of logits up to this size
# (recipes/models/head.py)
MAX_STORED_GRADIENTS = 3e9


class Numerics(Enum):
    """Dtypes of weights and hidden states in the forward of a layer."""

    # fp32 weights, cast to 16 bits for each product; fp32 hidden states between layers
    autocast = "autocast"
    # 16-bit weights and hidden states, as with FSDP2, ZeRO and precision.weights=bf16
    cast = "cast"
    fp32 = "fp32"

    @property
    def hidden_bytes(self) -> int:
        """Bytes per element of the hidden state between layers."""
        return 2 if self is Numerics.cast else 4

    @property
    def product_bytes(self) -> int:
        """Bytes per element of a matrix product's output."""
        return 4 if self is Numerics.fp32 else 2


@dataclass(frozen=True)
class MicroStep:
    """A micro-batch of `rows` sequences of `length` tokens on one rank."""

    model: Model
    numerics: Numerics
    rows: int
    length: int
    # With an adapter the base is frozen, so it saves no inputs for weight gradients.
    adapter: AdapterLayers | None
    checkpointing: bool
    fused: bool = True  # the GPU has a fused attention kernel for 16 bits
    # torch.compile recomputes norms, rotations and the activation function instead of saving them
    compiled: bool = False
    recomputed: int | None = None  # number of layers that checkpointing recomputes; None: all
    fp8: bool = False  # linear layers multiply in fp8
    head: Head = Head.tiled
    triton: bool = True  # its kernels compute the head
    # Liger's kernels save as little as compiled layers
    liger: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def recomputing(self) -> int:
        """Number of layers that save only their input and run again in the backward."""
        layers = self.model.num_layers
        recomputed = layers if self.recomputed is None else self.recomputed
        return min(layers, recomputed) if self.checkpointing else 0

    @property
    def recomputed_share(self) -> float:
        return self.recomputing / self.model.num_layers

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of all tokens between two layers."""
        return self.tokens * self.model.hidden_size * self.numerics.hidden_bytes

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Hidden, intermediate, query and key sizes in elements, of all experts of a token."""
        model = self.model
        query, key = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
        wide = model.intermediate_size * (model.experts_per_token if model.num_experts else 1)
        return model.hidden_size, wide, query, key

    def saved_by_layer(self) -> float:
        """Return the bytes that one layer saves for its backward, for all tokens."""
        hidden, wide, query, key = self.widths
        out, unfused = self.numerics.product_bytes, self.score_bytes() + 4 * self._query_copy()
        if self.model.num_experts:  # each expert of a token has a copy of its input, and an output
            unfused += self.tokens * 2 * out * self.model.experts_per_token * hidden
        if self.compiled or self.liger:
            return self.tokens * self._fused_per_token() + unfused
        if self.adapter:
            attention = self._attention(query, key)
            per_token = 8 * hidden + 3 * out * wide + attention + self.adapter.saved_per_token()
            return self.tokens * per_token + self.adapter.dora_weights() + unfused
        # both norms, with the copies of their outputs that the next five linear layers read
        norms = {
            # input and normed input in fp32; each linear layer makes a 16-bit copy
            Numerics.autocast: 2 * (4 + 4) + 5 * 2,
            # input in fp32, normed input, and output, which the linear layers share
            Numerics.cast: 2 * (4 + 2 + 2),
            Numerics.fp32: 2 * (4 + 4 + 4),
        }[self.numerics]
        per_token = norms * hidden + 4 * out * wide + self._attention(query, key)
        return self.tokens * per_token + unfused

    def _fused_per_token(self) -> float:
        """Return the bytes per token that a compiled layer saves.

        Inductor's partitioner saves inputs and outputs of both norms; gate, up and their product;
        query, key, value and the output of attention; and sums (torch 2.13,
        min_cut_rematerialization_partition). For qwen3, it also saves query and key before their
        norms. The corrections for fp8 and adapters come from peaks of an H100
        (docs/results/measured_steps.jsonl). With fp8, outputs of norms and the product of the MLP
        are recomputed. With a frozen base, the output of attention is saved for the A of o_proj.
        Liger saves the product of the MLP for the A of down_proj.
        """
        hidden, wide, query, key = self.widths
        heads, kv_heads = self.model.num_heads, self.model.num_kv_heads
        out, normed = self.numerics.product_bytes, normalizes_heads(self.model)
        sums = 4 * (2 + heads + (heads + kv_heads if normed else 0))
        size: float = 2 * (self.numerics.hidden_bytes + out) * hidden + 3 * out * wide
        size += (3 if normed else 2) * out * (query + key) + sums
        if self.fp8:
            size -= out * (2 * hidden + wide)
        if self.adapter:
            size += out * query + self.adapter.rank * out * len(self.adapter.sizes)
            size += out * wide if self.liger else 0
        return size

    def _attention(self, query: int, key: int) -> int:
        """Return the bytes per token that attention saves.

        These are query and key before and after their norms (qwen3) and after rotation, value,
        output, and the sums of scores in fp32.
        """
        out = self.numerics.product_bytes
        # A frozen norm saves its input in fp32. A trained one also saves the normed input.
        frozen = 4 if self.adapter else 4 + out
        normed = frozen if normalizes_heads(self.model) else 0
        return (query + key) * (normed + 2 * out) + 4 * self.model.num_heads

    def score_bytes(self) -> float:
        """Return the bytes of the attention scores, which are stored only without a fused kernel.

        torch lacks a fused kernel for some GPUs, where it computes 16-bit attention in fp32. It
        also lacks one for fp32 if several heads share a key.
        """
        model = self.model
        unfused = not self.fused or (
            self.numerics is Numerics.fp32 and model.num_kv_heads != model.num_heads
        )
        return 4.0 * self.rows * model.num_heads * self.length**2 if unfused else 0.0

    def _query_copy(self) -> float:
        """Return the bytes of one query-sized tensor, or 0 with a fused kernel.

        Without it, torch makes such copies to scale query and key, and to repeat keys and values.
        """
        return 4.0 * self.tokens * self.widths[2] if self.score_bytes() else 0.0

    def scattered(self) -> float:
        """Return an upper bound of the bytes in free pieces that torch's allocator cannot reuse.

        Checkpointing saves a hidden state per layer. Each may occupy part of a block that was freed
        by a larger tensor, such as the tile of our head for SFT. The rest of the block is then too
        small for another large tensor. The bound is the maximum that was observed.
        """
        if not self.recomputing:
            return 0.0
        tile = self._logits(TILE[0]) if self.head is Head.summed else 0.0
        return self.recomputing * self.hidden + self.score_bytes() + tile

    def backward_of_layer(self) -> float:
        """Return the bytes that a layer's backward needs in addition to the saved ones.

        These are gradients of the hidden state and of the factors in the MLP.
        """
        hidden, wide, _, _ = self.widths
        out = self.numerics.product_bytes
        if self.adapter:
            # The input of down_proj, or the copy of its weight, is already free.
            down = DOWN in self.adapter.sizes
            freed = 2.0 * wide * hidden if self.numerics is Numerics.autocast and not down else 0.0
            state = 2 * hidden if self.numerics is Numerics.cast else 0
            mlp = self.tokens * ((2 if down else 3) * out * wide + state) - freed
            return max(mlp, *map(self._adapter_forward, self.adapter.sizes))
        unfused = 2 * self.score_bytes() + 5 * self._query_copy()
        return max(self.hidden + self.tokens * 2 * out * wide, unfused)

    def _adapter_forward(self, name: str) -> float:
        """Return the bytes that the forward of an adapted linear layer adds at its peak.

        It is part of the backward with checkpointing. The bytes are on top of what the
        decoder layer saves, although part of that does not exist yet.
        """
        assert self.adapter is not None
        # size of each of gate, up, activation and product
        mlp = self.tokens * self.numerics.product_bytes * self.widths[1]
        if name == DOWN:  # the input is a separate tensor only if it is copied
            extra = mlp if self.adapter.is_mixed or self.adapter.dropout else 0
        else:
            extra = -3 * mlp if name in ATTENTION else -mlp
        forward = self.adapter.forward_bytes(name, self.tokens)
        return forward + extra + 6 * self.tokens * self.model.hidden_size

    def linear_bytes(self) -> float:
        """Return the bytes of one layer's 16-bit weight copies, which autocast keeps."""
        adapter = self.adapter.weight_copies() if self.adapter else 0.0
        copies = 2.0 * linear_parameters(self.model)
        return adapter + (copies if self.numerics is Numerics.autocast else 0.0)

    def _logits(self, tokens: int) -> float:
        """Return the bytes of the logits of up to `tokens` tokens, for the complete vocabulary."""
        return min(self.tokens, tokens) * self.model.vocab_size * self.numerics.product_bytes

    def tile(self) -> float:
        """Return the bytes of the logits in memory, with the 16-bit copy of the head's weights.

        Without Triton, they include temporary tensors.
        """
        folded = min(FOLDED, self.tokens * self.model.vocab_size)
        return self._stored_logits() + (0.0 if self.triton else FOLDED_BYTES * folded)

    def _stored_logits(self) -> float:
        copies = self.numerics is Numerics.autocast
        weights = 2.0 * self.model.vocab_size * self.model.hidden_size * copies
        if self.head is Head.kept and self._logits(self.tokens) <= MAX_STORED_GRADIENTS:
            return self._logits(self.tokens) + weights
        if self.head is Head.summed:
            return self._logits(TILE[0]) + weights
        # TRL's head processes part of the vocabulary at a time
        share = min(self.model.vocab_size, TILE[1]) / self.model.vocab_size
        return share * (self._logits(TILE[0]) + 2 * weights)

    def head_gradient(self, head_weights: float) -> float:
        """Return the bytes of the head's gradient, if the forward computes it with the loss."""
        return 4.0 * head_weights if self.head is Head.summed else 0.0

    def before_head(self) -> float:
        """Return the bytes of the last norm, its output and the copy that the head reads."""
        return 4 * self.hidden + self.tokens * 4 * self.model.hidden_size

    def head_backward(self) -> float:
        """Return the bytes of `before_head` and of gradients, in fp32 and in the hidden dtype."""
        return self.before_head() + self.tokens * 4 * self.model.hidden_size + self.hidden


def numerics(config: Config) -> Numerics:
    """Return the dtypes that precision and strategy imply."""
    if config.precision.compute == "fp32":
        return Numerics.fp32
    # nf4 is unpacked to 16 bits
    cast = config.topology.strategy in SHARDED or BYTES[config.precision.weights] <= 2
    return Numerics.cast if cast else Numerics.autocast


def micro_step(config: Config, size: Batch) -> MicroStep:
    """Return the micro-step of a rank. A preference pair has two rows."""
    precision, strategy, adapter = config.precision, config.topology.strategy, None
    all_layers, dtypes = config.topology.fsdp.activation_checkpointing, numerics(config)
    if config.adapter.rank is not None:
        # The weights of an adapter are fp32, unless the strategy casts all weights to 16 bits or
        # TRL casts them for nf4.
        fp32, nf4 = precision.compute == "fp32", precision.weights == "nf4"
        low = not fp32 and (nf4 or strategy in SHARDED)
        recast = nf4 or (dtypes is Numerics.cast and not low)
        width, out = 2 if low else 4, 4 if fp32 else 2
        adapter = AdapterLayers.of(config.model, config.adapter, width, out, recast)
    return MicroStep(
        config.model,
        dtypes,
        size.per_device * config.method.sequences_per_example,
        size.sequence,
        adapter,
        bool(value(config, "gradient_checkpointing")) or all_layers,
        config.hardware.fused_attention
        and config.hardware.attention != "eager"
        and not layers_of(config.model).sinks,  # transformers has only eager attention with sinks
        compiled=bool(value_or_none(config, "torch_compile") or config.step.compile),
        recomputed=None if all_layers else config.step.checkpointed_layers,
        fp8=precision.compute == "fp8",
        head=head_of(config),
        triton=config.hardware.triton,
        liger=bool(value_or_none(config, "use_liger_kernel")),
    )


def head_of(config: Config) -> Head:
    """Return how logits are computed.

    TRL's tiled head is used for completions, and under ZeRO-3, which shards the head. A frozen head
    has no gradients to store.
    """
    head = config.method.head
    completions = config.method.generates and config.step.rows != Rows.packed
    if config.topology.strategy == "zero3" or head is Head.tiled or completions:
        return Head.tiled
    return Head.kept if head is Head.kept and config.adapter.rank is None else Head.summed
