"""Fine-tune Qwen3-8B, in bf16, with fp8 products, or by LoRA: the MI350X report's fifth benchmark.

The report used AMD's MAD. Each GPU trains on 14 sequences of 8192 random tokens. Every layer is
compiled and recomputed in backward; the optimizer is fused AdamW; weights, gradients and moments
are bf16. Several GPUs use FSDP2, which also reduces gradients in bf16. Speed does not depend on the
weights, so they are random. The loss is TRL's, with a tile of the logits in memory at a time,
because 14 x 8192 rows of them would take 35 GB in bf16. fp8 is torchao's dynamic scaling of whole
tensors, in all linear layers except the head. The report does not state whether 14 is per GPU,
whether rows are full, LoRA's rank (here from conf/adapter/lora.yaml), the scaling of fp8, or the
dtype in which gradients are reduced.
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
from recipes.bench.timing import timed, training_step
from recipes.measure.flops import flops_per_token
from recipes.models.low_precision import to_float8
from recipes.models.model_build import adapter_config, build_model
from recipes.rank.names import name_field
from recipes.rank.program import main

MODES = {
    "full_bf16": ("bf16", "none"),
    "full_fp8": ("fp8", "none"),
    "lora_bf16": ("bf16", "lora"),
    "lora_fp8": ("fp8", "lora"),
}


@dataclass
class FinetuneConfig(SeriesConfig):
    """Hold the arguments. `modes`: names in MODES. `batch`: sequences per GPU."""

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
        "Here: full rows of random tokens; weights, gradients and moments in bf16; the loss "
        "of a tile of the logits at a time; fused AdamW."
    )
    table = Table("finetune", COLUMNS, figure="tokens_per_second_per_gpu", notes=[note])
    # Distinguishes published rows of the same shape. "plain": a loop without a trainer.
    compiled = "_compiled" if args.torch_compile else ""
    checkpointed = "_checkpointing" if args.gradient_checkpointing else ""
    with consensus.joined(device) as control:
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
            figures = consensus.slowest(control, lambda: trained(case, config, args, device))
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
            """Return a reason not to measure in fp8 on a device without it."""
            name = "the CPU" if args.use_cpu else config.hardware.name
            on_fp8 = not args.use_cpu and "fp8" in config.hardware.peak_tflops
            if case["precision"] != "fp8" or on_fp8:
                return None
            return f"{name} has no fp8 matrix units; leave fp8 out of method.args.modes"

        return measure(config, args, table, cases, work, skip=skip)


def trained(
    case: Row, config: DictConfig, args: FinetuneConfig, device: torch.device
) -> dict[str, float]:
    """Train a case on all ranks together, and return this rank's figures."""
    dtype = "fp32" if args.use_cpu else "bf16"
    adapter = {"name": case["adapter"]}
    if case["adapter"] == "lora":
        adapter |= {"rank": args.lora_rank, "alpha": args.lora_alpha}
    numerics = {"precision": {"compute": dtype, "weights": dtype}, "adapter": adapter}
    own = OmegaConf.merge(config, numerics)
    model = build_model(own).to(device)
    if case["adapter"] == "lora":
        # The adapter is bf16 too, because FSDP2 only gathers weights of equal dtype together.
        lora = adapter_config(own)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False).get_base_model()
    flops = flops_per_token(model, case["sequence"])
    if case["precision"] == "fp8":
        to_float8(model)
    layers = model.model.layers
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.torch_compile:
        for layer in layers:
            # Compile inside checkpointing and inside FSDP2's hooks.
            layer.forward = torch.compile(layer.forward)
    add_fused_lm_head(model.train())  # as SFTTrainer does
    if case["num_gpus"] > 1:
        shard([*layers, model], device, dist.group.WORLD)
    torch.manual_seed(args.seed + dist.get_rank())
    shape = (case["batch"], case["sequence"])
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    inputs = {"input_ids": tokens, "labels": tokens, "fused_lm_head": True, "use_cache": False}
    step = training_step(model, None, loss_of=lambda: model(**inputs).loss)
    figures = timed(step, device, args.warmup, args.steps)
    return {"flops_per_token": flops, **figures}


if __name__ == "__main__":
    main(finetune)
