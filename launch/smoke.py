"""smoke=true: any composition scaled down until a CPU runs it in seconds, along the same code path."""

from __future__ import annotations

import copy

from launch import shapes, trainer_args
from launch.schema import Config, Init, Link, Topology, Vendor

# Sizes only: what an argument means for the algorithm (loss, beta, scheduler ...) stays as composed.
SIZES = {
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",  # the end is near enough
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations": 2,
    "max_length": 64,
    "max_completion_length": 8,
    "max_new_tokens": 8,
    "samples_per_prompt": 1,
    "batch_size": 8,
    "torch_compile": False,
    "use_liger_kernel": False,
    "eval_strategy": "no",
    "optim": "adamw_torch",
}


def scale_down(config: Config) -> tuple[Config, list[str]]:
    """The small composition, and a line for each thing it leaves out."""
    small, left_out = copy.deepcopy(config), []
    _shrink_model(small)
    small.method.args |= {k: v for k, v in SIZES.items() if k in trainer_args.known(config)}
    small.method.args.pop("num_train_epochs", None)  # max_steps bounds it now
    small.data.num_train = small.data.num_train and 32
    small.data.num_heldout = min(small.data.num_heldout, 8)
    small.data.limit = min(small.data.limit or 32, 32)
    if small.adapter.rank is not None:
        small.adapter.rank = min(small.adapter.rank, 4)
    if config.precision.name != "fp32":
        left_out.append(f"precision={config.precision.name}: a CPU computes in fp32")
        small.precision.name = small.precision.compute = small.precision.weights = "fp32"
        small.precision.loss_scaling = small.adapter.quantize_base = False
    if config.topology.name != "single":
        left_out.append(f"topology={config.topology.name}: one process")
    small.topology = Topology(name="single", strategy="none")
    hardware = small.hardware
    hardware.vendor, hardware.link, hardware.attention, hardware.env = Vendor.none, Link.none, "sdpa", {}
    hardware.gpus_per_node, hardware.dataloader.num_workers, hardware.dataloader.pin_memory = 1, 0, False
    hardware.peak_tflops, hardware.precisions = {}, ["fp32"]
    hardware.compile = hardware.triton = hardware.vllm = True  # a CPU has them: no rule about the GPU applies
    return small, left_out


def _shrink_model(config: Config) -> None:
    """Two layers of width 64; heads of 32, the smallest that vLLM takes. A local model is small already or the user's choice."""
    model = config.model
    if model.path:
        return
    model.hub_id = model.revision = None
    model.init = Init.random
    model.num_layers, model.hidden_size, model.intermediate_size = 2, 64, 128
    model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size = 4, 2, 32, 512
    model.num_parameters = shapes.parameters(model)
