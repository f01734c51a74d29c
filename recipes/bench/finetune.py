"""Fine-tune Qwen3-8B in bf16, with fp8 products, or with LoRA: the MI350X report's fifth benchmark.

The report used AMD's MAD. Here each GPU trains on 14 sequences of 8192 random tokens. Every layer
is compiled, and recomputed in the backward pass. The optimizer is fused AdamW. Weights, gradients
and moments are bf16. On several GPUs, FSDP2 shards the model and also reduces gradients in bf16.
Weights are random, because they do not affect the speed. The loss is TRL's, which has one tile of
the logits in memory at a time. All 14 x 8192 rows would take 35 GB in bf16. In fp8, all linear
layers except the head use torchao's dynamic per-tensor scaling.

The report does not state whether 14 is per GPU, or whether rows are full. It does not state LoRA's
rank (here conf/adapter/lora.yaml's), the scaling of fp8, or the dtype of reduced gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from peft import get_peft_model
from trl.trainer.utils import add_fused_lm_head

from recipes.bench import consensus
from recipes.bench.benchmark import Row, SeriesConfig, Table, device_of, measure, rate
from recipes.bench.gpt import shard
from recipes.bench.timing import time_steps, training_step
from recipes.measure.flops import flops_per_token
from recipes.models.low_precision import to_float8
from recipes.models.model_build import adapter_config, build_model
from recipes.rank.names import name_field
from recipes.rank.program import main

MODES = {  # mode -> (precision, adapter)
    "full_bf16": ("bf16", "none"),
    "full_fp8": ("fp8", "none"),
    "lora_bf16": ("bf16", "lora"),
    "lora_fp8": ("fp8", "lora"),
}


@dataclass
class FinetuneConfig(SeriesConfig):
    """Arguments. `modes`: names in MODES. `batch`: sequences per GPU."""

    modes: list[str] = name_field(lambda: MODES, ["full_bf16", "full_fp8", "lora_bf16"])
    batch: int = 14
    sequence: int = 8192
    lora_rank: int = 16
    lora_alpha: int = 32
    torch_compile: bool = True
    gradient_checkpointing: bool = True
    warmup: int = 2
    steps: int = 3


COLUMNS = (
    "model precision adapter num_gpus batch sequence tokens_per_second_per_gpu "
    "tokens_per_second tflops_per_gpu share_of_peak memory_gb ms"
)


def finetune(config: DictConfig) -> dict[str, Any]:
    args = FinetuneConfig(**config.trainer_args)
    device = device_of(args)
    note = (
        "Measured with full rows of random tokens; bf16 weights, gradients and moments; a loss "
        "that computes one tile of the logits at a time; fused AdamW."
    )
    table = Table("finetune", COLUMNS, figure="tokens_per_second_per_gpu", notes=[note])
    # `setup` distinguishes published rows of the same shape. "plain" is a loop without a trainer.
    compiled = "_compiled" if args.torch_compile else ""
    checkpointed = "_checkpointing" if args.gradient_checkpointing else ""
    with consensus.control_group(device) as control:
        same = {
            "model": config.model.name,
            "num_gpus": dist.get_world_size(),
            "batch": args.batch,
            "sequence": args.sequence,
            "setup": f"plain{compiled}{checkpointed}",
        }
        cases = [
            {**same, "precision": precision, "adapter": adapter}
            for precision, adapter in (MODES[mode] for mode in args.modes)
        ]

        def work(case: Row) -> Row:
            figures = consensus.slowest_rank(
                control, lambda: train_case(case, config, args, device)
            )
            per_gpu = case["batch"] * case["sequence"] / figures["ms"] * 1e3
            tflops = per_gpu * figures.pop("flops_per_token") / 1e12
            return {
                **figures,
                "tokens_per_second_per_gpu": per_gpu,
                "tokens_per_second": per_gpu * case["num_gpus"],
                "tflops_per_gpu": tflops,
                "share_of_peak": rate(tflops, config, case["precision"])["share_of_peak"],
            }

        def skip(case: Row, rows: list[Row]) -> str | None:
            name = "the CPU" if args.use_cpu else config.hardware.name
            on_fp8 = not args.use_cpu and "fp8" in config.hardware.peak_tflops
            if case["precision"] != "fp8" or on_fp8:
                return None
            return f"{name} has no fp8 matrix units. Use method.args.modes=[full_bf16,lora_bf16]."

        return measure(config, args, table, cases, work, skip=skip)


def train_case(
    case: Row, config: DictConfig, args: FinetuneConfig, device: torch.device
) -> dict[str, float]:
    """Train a case together with all other ranks, and return this rank's figures."""
    dtype = "fp32" if args.use_cpu else "bf16"
    adapter = {"name": case["adapter"]}
    if case["adapter"] == "lora":
        adapter |= {"rank": args.lora_rank, "alpha": args.lora_alpha}
    numerics = {"precision": {"compute": dtype, "weights": dtype}, "adapter": adapter}
    case_config = OmegaConf.merge(config, numerics)
    model = build_model(case_config).to(device)
    if case["adapter"] == "lora":
        # The adapter is bf16 too, because FSDP2 only gathers weights of equal dtype together.
        lora = adapter_config(case_config)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False).get_base_model()
    flops = flops_per_token(model, case["sequence"])
    if case["precision"] == "fp8":
        to_float8(model)
    layers = model.model.layers
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.torch_compile:
        for layer in layers:
            # Only forward, so that checkpointing and FSDP2's hooks stay outside the compiled code.
            layer.forward = torch.compile(layer.forward)
    add_fused_lm_head(model.train())  # as SFTTrainer does
    if case["num_gpus"] > 1:
        shard([*layers, model], device, dist.group.WORLD)
    torch.manual_seed(args.seed + dist.get_rank())
    shape = (case["batch"], case["sequence"])
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    inputs = {"input_ids": tokens, "labels": tokens, "fused_lm_head": True, "use_cache": False}
    step = training_step(model, None, loss_of=lambda: model(**inputs).loss)
    figures = time_steps(step, device, args.warmup, args.steps)
    return {"flops_per_token": flops, **figures}


if __name__ == "__main__":
    main(finetune)
