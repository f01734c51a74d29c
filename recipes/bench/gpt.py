"""The GPT-style transformers of the MI350X report (its benchmarks 3 and 4), 30M to 10.1B parameters.

The report gives layers, heads, width and feed-forward. The rest follows from its figures: in all eight rows TFLOPS are 6 N x tokens/s, so N is
known to three digits or more, and it comes out with GPT-2's vocabulary of 50,257, a head tied to the embedding, a learned position for each token
of the sequence, two matrices in the feed-forward, and five vectors of the width in a layer: here two layer norms with bias, and a bias on what
attention returns. tests/unit/test_bench_transformer.py holds N against the report. It leaves unstated: dropout (none here), the activation
(GELU here) and the attention kernel (torch's scaled_dot_product_attention here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn

from recipes.bench.training import numerics
from recipes.common.errors import UserError, near

VOCABULARY = 50257


@dataclass(frozen=True)
class Size:
    """`batch` sequences of `sequence` tokens are what the report trained it with on one GPU."""

    layers: int
    heads: int
    width: int
    feed_forward: int
    batch: int
    sequence: int
    vocabulary: int = VOCABULARY


SIZES = {
    "small": Size(6, 6, 384, 1536, 32, 512),
    "medium": Size(12, 12, 768, 3072, 16, 512),
    "large": Size(24, 16, 1024, 4096, 8, 512),
    "xl": Size(36, 20, 1280, 5120, 4, 512),
    "1.5b": Size(48, 24, 1536, 6144, 4, 512),
    "3b": Size(32, 32, 2560, 10240, 2, 512),
    "7b": Size(32, 32, 4096, 11008, 8, 1024),
    "13b": Size(40, 40, 5120, 13824, 4, 1024),
    "tiny": Size(2, 2, 64, 128, 2, 32, vocabulary=512),  # not the report's: for smoke=true
}


def check_names(models: Sequence[str]) -> None:
    """Raises UserError for a model that is not in SIZES, and for none."""
    if not models:
        raise UserError("method.args.models=[]: nothing would be measured.")
    for name in models:
        if name not in SIZES:
            raise UserError(f"method.args.models={name}: unknown. {near(name, SIZES)}")


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Takes tokens (batch, sequence) and the tokens that follow them, and returns the mean loss in nats."""

    def __init__(self, size: Size, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)  # the head, too
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
    """With random weights, drawn where they will be: a CPU needs minutes for 10e9."""
    with torch.device("meta"):
        model = GPT(size, sequence).to(dtype)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)  # GPT-2's
        else:
            nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def notes(config: DictConfig) -> list[str]:
    """What the published tables do not say of themselves, said of ours."""
    found = [f"Here: {numerics(config)}; fused AdamW; SDPA; TFLOPS are 6 x parameters x tokens/s."]
    if config.precision.weights == "fp32" and config.precision.compute != "fp32":
        found.append("The MI350X report's 119.7 GB for 10.1B parameters are those of 16-bit weights: precision.weights=bf16.")
    return found


def random_batch(size: Size, batch: int, sequence: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and those that follow them: both (batch, sequence)."""
    tokens = torch.randint(size.vocabulary, (batch, sequence + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
