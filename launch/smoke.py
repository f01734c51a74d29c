"""smoke=true: any composition scaled down until a CPU runs it in seconds, along the same code path."""

from __future__ import annotations

import copy
import importlib.util

from launch import shapes, trainer_args
from launch.schema import Config, Topology
from launch.schema_enums import Debug, Init, Link, Profile, Rocprof, Vendor

# Sizes only: what an argument means for the algorithm (loss, beta, scheduler ...) stays as composed. One that the command line gives stays,
# too (launch/compose.py adds it to method.smoke).
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
}
LOW_PRECISION = {"fp8": "torchao", "nf4": "bitsandbytes"}  # the packages that compute in them
# Arguments that a CPU has no use for, whoever gives them, and why.
NOT_ON_A_CPU = {
    "torch_compile": (False, "compiling takes minutes of a CPU"),
    "use_liger_kernel": (False, "Liger's kernels are for a GPU"),
    "fail_below": (None, "a CPU's figures are compared with nothing"),
    "optim": ("adamw_torch", "the optimizer that runs everywhere"),
}


def scale_down(config: Config) -> tuple[Config, list[str]]:
    """The small composition, and a line for each thing it leaves out."""
    small, left_out = copy.deepcopy(config), []
    _shrink_model(small)
    left_out += _shrink_arguments(small)
    small.data.num_train = small.data.num_train and 32
    small.data.num_heldout = min(small.data.num_heldout, 8)
    small.data.limit = min(small.data.limit or 32, 32)
    if small.adapter.rank is not None and small.adapter.path is None:  # one that is loaded has its own
        small.adapter.rank = min(small.adapter.rank, 4)
    if config.precision.name != "fp32" and not _has_precision(config):
        left_out.append(f"precision={config.precision.name}: a CPU computes in fp32")
        small.precision.name = small.precision.compute = small.precision.weights = "fp32"
        small.precision.loss_scaling = small.adapter.quantize_base = False
    _shrink_topology(small, left_out)
    small.effective_batch = None
    if small.debug != Debug.none:
        left_out.append(f"debug={small.debug.name}: its variables are for a GPU")
        small.debug = Debug.none
    if small.profile in (Profile.memory, Profile.rocprof):
        left_out.append(f"profile={small.profile.name}: it watches a GPU; profile=torch here")
        small.profile, small.rocprof = Profile.torch, Rocprof.v3
    hardware = small.hardware
    hardware.vendor, hardware.link, hardware.attention, hardware.env = Vendor.none, Link.none, "sdpa", {}
    hardware.gpus_per_node = max(1, small.topology.num_gpus or 1)
    hardware.dataloader.num_workers, hardware.dataloader.pin_memory = 0, False
    hardware.peak_tflops, hardware.precisions = {}, [small.precision.name]
    hardware.compile = hardware.triton = hardware.vllm = True  # a CPU has them: no rule about the GPU applies
    return small, left_out


def _shrink_arguments(config: Config) -> list[str]:
    """A line for each that a CPU cannot have. Those of method.smoke stand last: the method's own sizes, and what was given."""
    args, known = config.method.args, trainer_args.known(config)
    saves = {"save_strategy": "steps", "save_steps": 1} if config.method.selection.metric else {}  # models to choose from
    own = {name: value for name, value in config.method.smoke.items() if name not in NOT_ON_A_CPU}
    bounded = "num_train_epochs" in own and "max_steps" not in own  # else max_steps bounds it
    sizes = {name: value for name, value in SIZES.items() if name in known and not (bounded and name == "max_steps")}
    args |= sizes | saves | own
    if bounded:
        args.pop("max_steps", None)
    else:
        args.pop("num_train_epochs", None)
    left_out = []
    for name, (value, why) in NOT_ON_A_CPU.items():
        if name in known:
            if args.get(name, value) != value:
                left_out.append(f"method.args.{name}={args[name]}: {why}")
            args[name] = value
    return left_out


def _shrink_topology(config: Config, left_out: list[str]) -> None:
    """Two processes where there were several; the server is vLLM's build for the CPU."""
    topology = config.topology
    if topology.numa_binding:
        left_out.append(f"topology.numa_binding={topology.numa_binding.value}: ranks on every core")
        topology.numa_binding = None
    if topology.servers and not _has_vllm(config):
        left_out.append("topology=split: a trainer alone, and transformers generates (`make vllm` installs vLLM's build for the CPU)")
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return
    if topology.name == "colocate":
        left_out.append("topology=colocate: transformers generates (vLLM shares memory with a trainer on a GPU only)")
        config.topology = Topology("single", num_gpus=1, strategy="none")
        return
    if topology.name == "single":
        return
    if topology.servers:
        if (topology.servers, topology.server_tensor_parallel) != (1, 1):
            left_out.append(f"topology.servers={topology.servers}, server_tensor_parallel={topology.server_tensor_parallel}: one process")
        topology.servers, topology.server_tensor_parallel, topology.server_max_length = 1, 1, 1024
    if topology.servers and not config.model.path:
        # After a reload vLLM's CPU kernels keep the old weights of a head that is tied to the embedding.
        config.model.tied_embeddings = False
        config.model.num_parameters = shapes.parameters(config.model)
    if topology.num_gpus is None or topology.num_gpus > 2:
        left_out.append(f"topology.num_gpus={topology.num_gpus or config.hardware.gpus_per_node}: two processes")
        topology.num_gpus = 2


def _has_precision(config: Config) -> bool:
    """bitsandbytes has kernels for a CPU, and torchao rounds to fp8 there, where the Python that runs the ranks has them."""
    package = LOW_PRECISION.get(config.precision.name)
    return package is not None and config.runtime.on_node == "local" and importlib.util.find_spec(package) is not None


def _has_vllm(config: Config) -> bool:
    """In the Python that runs the ranks: the launcher's own. The cpu image holds none."""
    return config.runtime.on_node == "local" and importlib.util.find_spec("vllm") is not None


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
