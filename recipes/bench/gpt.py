"""Define the GPT-style transformers of the MI350X report's benchmarks 3 and 4, 30M to 10.1B.

The report states layers, heads, width and feed-forward. The rest is derived from its figures:

- In all eight rows TFLOPS are 6 N x tokens/s, so the number of parameters N is known to at least
  three digits. N fits GPT-2's vocabulary of 50,257, a head tied to the embedding, a learned
  position for each token, two feed-forward matrices, and five vectors of the width per layer. We
  use these five for two layer norms with bias and for a bias on attention's output.
- The memory of the two largest models (107.9 and 119.7 GB) fits to 0.1 GB with
  `attention="eager", dropout=0.1` and bf16 weights, gradients and moments. That attention saves its
  scores, and dropout applies to the scores and to both branches.

The default is torch's scaled_dot_product_attention without dropout, which needs 45 and 35 GB less.
The report does not state the activation; we use GELU. tests/recipes/bench/test_transformer.py
compares these models with the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from recipes.bench.benchmark import Row
from recipes.bench.timing import autocast, numerics, time_steps, training_step, weights_dtype

VOCABULARY = 50257
ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Size:
    """A model's shape, with the `batch` and `sequence` that the report used on one GPU."""

    layers: int
    heads: int
    width: int
    feed_forward: int
    batch: int
    sequence: int
    vocabulary: int = VOCABULARY
    attention: str = "sdpa"
    dropout: float = 0.0


SIZES = {
    "small": Size(6, 6, 384, 1536, 32, 512),
    "medium": Size(12, 12, 768, 3072, 16, 512),
    "large": Size(24, 16, 1024, 4096, 8, 512),
    "xl": Size(36, 20, 1280, 5120, 4, 512),
    "1.5b": Size(48, 24, 1536, 6144, 4, 512),
    "3b": Size(32, 32, 2560, 10240, 2, 512),
    "7b": Size(32, 32, 4096, 11008, 8, 1024),
    "13b": Size(40, 40, 5120, 13824, 4, 1024),
    "tiny": Size(2, 2, 64, 128, 2, 32, vocabulary=512),  # for smoke=true; not in the report
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.attention, self.dropout = size.heads, size.attention, size.dropout
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, sequence, width), and return the same shape."""
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        attended = self.attend(*heads.permute(2, 0, 3, 1, 4).unbind(0))
        attended = attended.transpose(1, 2).reshape(batch, sequence, width)
        x = x + F.dropout(self.out(attended), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention; all tensors are (batch, heads, sequence, width of a head)."""
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, dropout_p=self.dropout
            )
        scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        shares = scores.masked_fill(future, float("-inf")).softmax(-1)
        return F.dropout(shares, self.dropout) @ values


class GPT(nn.Module):
    """A model that returns the mean loss in nats of predicting `following` from `tokens`.

    Both are (batch, sequence).
    """

    def __init__(self, size: Size, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)  # also the head
        self.positions = nn.Embedding(sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def build(size: Size, sequence: int, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build a model with random weights, drawn on `device` because a CPU takes minutes for 10B."""
    with torch.device("meta"):
        model = GPT(size, sequence).to(dtype)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)  # as in GPT-2
        else:
            nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model


def train_case(
    size: Size,
    case: Row,
    config: DictConfig,
    args: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Train a case with the ranks of `group`, or on one GPU, and return this rank's figures.

    `args` has the `seed`, and the numbers of untimed (`warmup`) and timed steps (`steps`).
    """
    model: nn.Module = build(size, case["sequence"], device, weights_dtype(config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # All ranks have drawn the same weights, as FSDP2 requires. Their batches differ.
    if group is not None:
        torch.manual_seed(args.seed + dist.get_rank())
    batch = random_batch(size.vocabulary, case["batch"], case["sequence"], device)
    if group is not None and case["strategy"] == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        # Without views into buckets, every gradient is in memory twice.
        model = DistributedDataParallel(
            model, process_group=group, device_ids=ids, gradient_as_bucket_view=True
        )
    elif group is not None:
        shard([*model.blocks, model], device, group)
    step = training_step(model, autocast(config))
    figures = time_steps(lambda: step(*batch), device, args.warmup, args.steps)
    return {"parameters": parameters, **figures}


def shard(modules: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup) -> None:
    """Apply FSDP2 to modules, outermost last. Each module's parameters are gathered together."""
    mesh = DeviceMesh.from_group(group, device.type)
    for module in modules:
        fully_shard(module, mesh=mesh)


def shape(name: str, batch: int | None, sequence: int | None) -> dict[str, int]:
    """Return `batch` and `sequence`, by default the model size's."""
    return {"batch": batch or SIZES[name].batch, "sequence": sequence or SIZES[name].sequence}


def note(config: DictConfig, attention: str = "sdpa", dropout: float = 0.0) -> str:
    return (
        f"Measured with {numerics(config)}; fused AdamW; attention {attention}, dropout "
        f"{dropout:g}. TFLOPS are 6 x parameters x tokens/s."
    )


def random_batch(
    vocabulary: int, batch: int, sequence: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and the tokens that follow them, both (batch, sequence)."""
    tokens = torch.randint(vocabulary, (batch, sequence + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
