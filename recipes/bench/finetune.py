"""Fine-tuning of Qwen3-8B, full in bf16 and with fp8 products, and LoRA: the MI350X report's fifth benchmark, made with AMD's MAD.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=bench/finetune model=qwen3_8b model.init=random
    8 GPUs:  python launch/run.py hardware=mi350x method=bench/finetune model=qwen3_8b model.init=random

14 sequences of 8192 random tokens a GPU, every layer compiled and recomputed in backward, fused AdamW, weights, gradients and moments in
bf16; over several GPUs by FSDP2, whose gradients travel in bf16, too. Speed does not depend on the weights, so random ones do. The head and
its loss are computed a sequence at a time and again in backward: 14 x 8192 rows of logits would take 35 GB in bf16. fp8 is torchao's
dynamic scaling of whole tensors, in all linear layers but the head. The report leaves unstated: whether 14 is a GPU's batch, whether rows
are full, LoRA's rank (here that of conf/adapter/lora.yaml), the scaling of fp8, and in which dtype gradients travel.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from peft import get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.bench import ranks
from recipes.bench.scaling import shard
from recipes.bench.series import Column, Row, SeriesConfig, Table, device_of, measure, refusals
from recipes.bench.training import fresh, timed, training_step
from recipes.common.errors import UserError
from recipes.common.flops import flops_per_token
from recipes.common.low_precision import package, to_float8
from recipes.common.model import adapter_config, build_model
from recipes.common.names import named
from recipes.common.program import main

MODES = {"full_bf16": ("bf16", "none"), "full_fp8": ("fp8", "none"), "lora_bf16": ("bf16", "lora"), "lora_fp8": ("fp8", "lora")}


@dataclass
class FinetuneConfig(SeriesConfig):
    """`modes`: names of MODES. `batch`: sequences a GPU, of `sequence` tokens. Raises UserError."""

    modes: list[str] = named(lambda: MODES, ["full_bf16", "full_fp8", "lora_bf16"])
    batch: int = 14
    sequence: int = 8192
    lora_rank: int = 16
    lora_alpha: int = 32
    torch_compile: bool = True
    gradient_checkpointing: bool = True
    warmup: int = 2
    steps: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("modes")


COLUMNS = [
    Column("model", "model"),
    Column("precision", "precision"),
    Column("adapter", "adapter"),
    Column("num_gpus", "GPUs"),
    Column("batch", "batch/GPU"),
    Column("sequence", "tokens"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", 0),
    Column("tokens_per_second", "tokens/s", 0),
    Column("tflops_per_gpu", "TFLOPS/GPU", 1),
    Column("share_of_peak", "of peak", 2),
    Column("memory_gb", "GB/GPU", 2),
    Column("ms", "ms/step", 0),
]


def finetune(config: DictConfig) -> dict[str, Any]:
    args = FinetuneConfig(**config.trainer_args)
    device = device_of(args)
    note = "Here: full rows of random tokens; weights, gradients and moments in bf16; the loss a sequence at a time; fused AdamW."
    table = Table("finetune", COLUMNS, figure="tokens_per_second_per_gpu", notes=[note])
    with ranks.joined(device) as control:
        n = dist.get_world_size()
        shared = {"model": config.model.name, "num_gpus": n, "batch": args.batch, "sequence": args.sequence, "setup": setup(args)}
        cases = [{**shared, "precision": MODES[mode][0], "adapter": MODES[mode][1]} for mode in args.modes]
        return measure(config, args, table, cases, lambda case: one(case, config, args, device, control))


def setup(args: FinetuneConfig) -> str:
    """What tells published rows of one shape apart: plain (a loop, no trainer), compiled, with checkpointing."""
    return "plain" + "_compiled" * args.torch_compile + "_checkpointing" * args.gradient_checkpointing


def one(case: Row, config: DictConfig, args: FinetuneConfig, device: torch.device, control: dist.ProcessGroup) -> Row:
    # Of several ranks one that goes on alone would wait for the others for ever.
    with refusals(case["precision"]) if case["num_gpus"] == 1 else contextlib.nullcontext():
        found = ranks.slowest(control, lambda: trained(case, config, args, device))
    per_gpu = case["batch"] * case["sequence"] / found["ms"] * 1e3
    tflops = per_gpu * found.pop("flops_per_token") / 1e12
    peak = config.hardware.peak_tflops.get(case["precision"])
    return {
        **found,
        "tokens_per_second_per_gpu": per_gpu,
        "tokens_per_second": per_gpu * case["num_gpus"],
        "tflops_per_gpu": tflops,
        "share_of_peak": tflops / peak if peak else None,
    }


def trained(case: Row, config: DictConfig, args: FinetuneConfig, device: torch.device) -> dict[str, float]:
    """What this rank measures, with all others."""
    check_fp8(case, config, args)
    torch._dynamo.reset()  # the last row's compiled layers, before its memory is given back
    fresh(device)
    own = numerics_of(case, config, args)
    model = build_model(own).to(device)
    if case["adapter"] == "lora":
        # The adapter in bf16 too: FSDP2 gathers weights of one dtype together.
        model = get_peft_model(model, adapter_config(own), autocast_adapter_dtype=False).get_base_model()
    flops = flops_per_token(model, case["sequence"])
    if case["precision"] == "fp8":
        to_float8(model)
    layers = model.model.layers
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.torch_compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward)  # inside of what checkpointing repeats, and of FSDP2's hooks
    whole = WithLoss(model.train())
    if case["num_gpus"] > 1:
        shard([*layers, whole], device, dist.group.WORLD)
    torch.manual_seed(args.seed + dist.get_rank())
    tokens = torch.randint(config.model.vocab_size, (case["batch"], case["sequence"] + 1), device=device)
    step = training_step(whole, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), own)
    return {"flops_per_token": flops, **timed(step, device, args.warmup, args.steps)}


class WithLoss(nn.Module):
    """Takes tokens (batch, sequence) and those that follow them, and returns the mean loss in nats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        losses = [checkpoint(self.head, rows, targets, use_reentrant=False) for rows, targets in zip(hidden, following, strict=True)]
        return torch.stack(losses).mean()

    def head(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Of one sequence: (tokens, width)."""
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), following)


def numerics_of(case: Row, config: DictConfig, args: FinetuneConfig) -> DictConfig:
    """The run's configuration with the case's precision and adapter. On a CPU everything is in fp32."""
    dtype = "fp32" if args.use_cpu else "bf16"
    adapter = {"rank": args.lora_rank, "alpha": args.lora_alpha} if case["adapter"] == "lora" else {}
    changes = {"precision": {"compute": dtype, "weights": dtype}, "adapter": {"name": case["adapter"], **adapter}}
    return OmegaConf.merge(config, changes)


def check_fp8(case: Row, config: DictConfig, args: FinetuneConfig) -> None:
    """Raises UserError where a case asks for fp8 and this machine has none."""
    if case["precision"] != "fp8":
        return
    if args.use_cpu or "fp8" not in config.hardware.peak_tflops:
        name = "the CPU" if args.use_cpu else config.hardware.name
        raise UserError(f"{name} has no fp8 matrix units: leave the modes with fp8 out of method.args.modes.")
    package("torchao.float8", "fp8", "torchao")


if __name__ == "__main__":
    main(finetune)
