"""Count bytes that a micro-step holds in addition to weights and optimizer.

That is what autograd saves per layer, and what each part of a step adds. The counts come from
the models of transformers 5.17 (qwen3, qwen2, llama), run layer by layer in eager mode with fused
attention, and from TRL 1.16's head, which computes log-probabilities in tiles and never holds all
logits. `tests/gpu/predictions.py` measures them on a GPU. Symbols: hidden H, intermediate I, query
width Q, key width K, vocabulary V.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launch.estimate.adapted import ATTENTION, DOWN, Adapted
from launch.estimate.batch_counts import Batch
from launch.schema import Config, Model
from launch.schema.enums import Head, Rows
from launch.schema.shapes import linear_sizes
from launch.schema.trainer_args import argument, value

# nf4: 4 bits, and an fp32 scale per 64 weights (arXiv:2305.14314)
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "nf4": 0.5625}
SHARDED = ("fsdp", "zero2", "zero3")
# tokens and vocabulary entries that TRL's head takes at once; our head takes all entries
# (recipes/models/head.py)
TILE = (4096, 32768)
# bytes: a head of log-probabilities keeps the gradients of logits up to this size
# (recipes/models/head.py)
KEPT = 3e9


class Numerics(Enum):
    """Dtypes of weights and hidden states while a layer runs."""

    # fp32 weights, copied to 16 bits for each product; hidden states between layers in fp32
    autocast = "autocast"
    # 16-bit weights and hidden states: FSDP2's mixed precision, ZeRO, precision.weights=bf16
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
    # if any, the base is frozen, so its linear layers save no inputs for weight gradients
    adapter: Adapted | None
    checkpointing: bool
    fused: bool = True  # the GPU has a fused attention kernel for 16 bits
    # torch.compile recomputes norms, rotations and the activation instead of keeping them
    compiled: bool = False
    recomputed: int | None = None  # layers that recompute under checkpointing; None: all
    fp8: bool = False  # linear layers multiply in fp8
    head: Head = Head.tiled
    # Liger's kernels for norms, rotations and the activation keep as little as compiled ones
    liger: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def recomputing(self) -> int:
        """Number of layers that keep only their input and run again in the backward."""
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
        """H, I, Q and K in elements."""
        model = self.model
        query, key = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
        return model.hidden_size, model.intermediate_size, query, key

    def saved_by_layer(self) -> float:
        """Return bytes that one layer keeps for its backward, for all tokens."""
        hidden, wide, query, key = self.widths
        out, kept = self.numerics.product_bytes, self.scores() + 4 * self._copies_of_query()
        if self.compiled or self.liger:
            return self.tokens * self._fused_per_token() + kept
        if self.adapter:
            attention = self._attention(query, key)
            per_token = 8 * hidden + 3 * out * wide + attention + self.adapter.saved()
            return self.tokens * per_token + self.adapter.matrices() + kept
        # Both norms, with the copies of their outputs that the next five linear layers read.
        norms = {
            # input and normed in fp32; each linear layer casts its own copy
            Numerics.autocast: 2 * (4 + 4) + 5 * 2,
            # input in fp32, normed, and output, which the linear layers share
            Numerics.cast: 2 * (4 + 2 + 2),
            Numerics.fp32: 2 * (4 + 4 + 4),
        }[self.numerics]
        per_token = norms * hidden + 4 * out * wide + self._attention(query, key)
        return self.tokens * per_token + kept

    def _fused_per_token(self) -> float:
        """Return bytes per token that inductor's partitioner keeps.

        These are inputs and outputs of both norms; gate, up and their product; query, key, value
        and output of attention (query and key before qwen3's norms too); and sums (torch 2.13,
        min_cut_rematerialization_partition). Corrections for fp8 and adapters were read off peaks
        of an H100 (docs/speed.md). With fp8, the norms' outputs and the activation's product are
        recomputed. With a frozen base, attention's output is kept because o_proj's A reads it, and
        Liger's autograd functions keep the activation's product for down_proj's A.
        """
        hidden, wide, query, key = self.widths
        heads, kv_heads = self.model.num_heads, self.model.num_kv_heads
        out, normed = self.numerics.product_bytes, self.model.architecture == "qwen3"
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
        """Return bytes per token of attention's tensors.

        These are query and key before and after their norms (qwen3) and after rotation, value,
        output, and fp32 score sums.
        """
        out = self.numerics.product_bytes
        # a frozen norm keeps its input in fp32; a trained one also keeps its normed input
        frozen = 4 if self.adapter else 4 + out
        normed = frozen if self.model.architecture == "qwen3" else 0
        return (query + key) * (normed + 2 * out) + 4 * self.model.num_heads

    def scores(self) -> float:
        """Return bytes of the attention weights.

        Torch keeps them in fp32 if it has no fused kernel. It has none on some GPUs (which then
        compute 16 bits in fp32), nor in fp32 if several heads share a key.
        """
        model = self.model
        unfused = not self.fused or (
            self.numerics is Numerics.fp32 and model.num_kv_heads != model.num_heads
        )
        return 4.0 * self.rows * model.num_heads * self.length**2 if unfused else 0.0

    def _copies_of_query(self) -> float:
        """Return bytes of one query-sized tensor.

        Without a fused kernel, torch scales query and key, and repeats keys and values.
        """
        return 4.0 * self.tokens * self.widths[2] if self.scores() else 0.0

    def scattered(self) -> float:
        """Return the most bytes that torch's allocator was seen to hold in free pieces.

        Checkpointing keeps a hidden state per layer, each possibly in a block that a larger tensor
        had, such as the tile of SFT's own head. The rest of that block is too small for another.
        tests/launch/estimate/test_allocator.py replays it.
        """
        if not self.recomputing:
            return 0.0
        tile = self._logits(TILE[0]) if self.head is Head.summed else 0.0
        return self.recomputing * self.hidden + self.scores() + tile

    def backward_of_layer(self) -> float:
        """Return bytes that a layer's backward adds to what it saved.

        These are gradients of its hidden state and of the MLP's factors.
        """
        hidden, wide, _, _ = self.widths
        out = self.numerics.product_bytes
        if self.adapter:
            # By then, down_proj's input or its weight's copy is free.
            down = DOWN in self.adapter.sizes
            freed = 2.0 * wide * hidden if self.numerics is Numerics.autocast and not down else 0.0
            around = 2 * hidden if self.numerics is Numerics.cast else 0
            mlp = self.tokens * ((2 if down else 3) * out * wide + around) - freed
            return max(mlp, *map(self._computing, self.adapter.sizes))
        unfused = 2 * self.scores() + 5 * self._copies_of_query()
        return max(self.hidden + self.tokens * 2 * out * wide, unfused)

    def _computing(self, name: str) -> float:
        """Return bytes that an adapted linear layer's forward adds to what its decoder layer holds.

        A checkpointed backward repeats that forward.
        """
        assert self.adapter is not None
        # size of each of gate, up, activation and product
        mlp = self.tokens * self.numerics.product_bytes * self.model.intermediate_size
        if name == DOWN:  # its input is a separate tensor only if it reads a copy
            extra = mlp if self.adapter.copies or self.adapter.dropout else 0
        else:
            extra = -3 * mlp if name in ATTENTION else -mlp
        return (
            self.adapter.computing(name, self.tokens)
            + extra
            + 6 * self.tokens * self.model.hidden_size
        )

    def linear_bytes(self) -> float:
        """Return bytes of one layer's 16-bit weight copies, which autocast keeps."""
        own = self.adapter.weights() if self.adapter else 0.0
        copies = 2.0 * sum(i * o for i, o in linear_sizes(self.model))
        return own + (copies if self.numerics is Numerics.autocast else 0.0)

    def _logits(self, tokens: int) -> float:
        """Return bytes of the logits of up to `tokens` tokens, for the whole vocabulary."""
        return min(self.tokens, tokens) * self.model.vocab_size * self.numerics.product_bytes

    def tile(self) -> float:
        """Return bytes of the logits held at once, with the weights' 16-bit copy."""
        copies = self.numerics is Numerics.autocast
        weights = 2.0 * self.model.vocab_size * self.model.hidden_size * copies
        if self.head is Head.kept and self._logits(self.tokens) <= KEPT:
            return self._logits(self.tokens) + weights
        if self.head is Head.summed:
            return self._logits(TILE[0]) + weights
        # TRL's head takes part of the vocabulary at a time
        share = min(self.model.vocab_size, TILE[1]) / self.model.vocab_size
        return share * (self._logits(TILE[0]) + 2 * weights)

    def head_gradient(self, head_weights: float) -> float:
        """Return bytes of the head's gradient, which SFT's own head computes with its loss."""
        return 4.0 * head_weights if self.head is Head.summed else 0.0

    def before_head(self) -> float:
        """Return bytes of the last norm, its output and the copy that the head reads."""
        return 4 * self.hidden + self.tokens * 4 * self.model.hidden_size

    def head_backward(self) -> float:
        """Return `before_head` plus the hidden states' gradients, in fp32 and as passed on."""
        return self.before_head() + self.tokens * 4 * self.model.hidden_size + self.hidden


def numerics(config: Config) -> Numerics:
    if config.precision.compute == "fp32":
        return Numerics.fp32
    # nf4 unpacks to 16 bits
    cast = config.topology.strategy in SHARDED or BYTES[config.precision.weights] <= 2
    return Numerics.cast if cast else Numerics.autocast


def micro_step(config: Config, size: Batch) -> MicroStep:
    """Return the micro-step of a rank; a preference counts as two rows."""
    precision, strategy, adapter = config.precision, config.topology.strategy, None
    all_layers, dtypes = config.topology.fsdp.activation_checkpointing, numerics(config)
    if config.adapter.rank is not None:
        # An adapter's weights are fp32 under autocast, unless the strategy casts all weights or TRL
        # casts them with nf4.
        fp32, nf4 = precision.compute == "fp32", precision.weights == "nf4"
        low = not fp32 and (nf4 or strategy in SHARDED)
        recast = nf4 or (dtypes is Numerics.cast and not low)
        bytes_ = (2 if low else 4, 4 if fp32 else 2)
        adapter = Adapted.of(config.model, config.adapter, *bytes_, recast)
    return MicroStep(
        config.model,
        dtypes,
        size.per_device * config.method.sequences_per_example,
        size.sequence,
        adapter,
        bool(value(config, "gradient_checkpointing")) or all_layers,
        config.hardware.fused_attention and config.hardware.attention != "eager",
        compiled=bool(argument(config, "torch_compile") or config.step.compile),
        recomputed=None if all_layers else config.step.checkpointed_layers,
        fp8=precision.compute == "fp8",
        head=head_of(config),
        liger=bool(argument(config, "use_liger_kernel")),
    )


def head_of(config: Config) -> Head:
    """Return how logits are computed.

    ZeRO-3 never has the whole head in a backward, completions use TRL's head, and the gradients of
    a frozen head are not kept.
    """
    head = config.method.head
    completions = config.method.generates and config.step.rows != Rows.packed
    if config.topology.strategy == "zero3" or head is Head.tiled or completions:
        return Head.tiled
    return Head.kept if head is Head.kept and config.adapter.rank is None else Head.summed
