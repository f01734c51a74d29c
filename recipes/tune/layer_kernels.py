"""Generate the Triton kernels of one compiled decoder layer for an AMD GPU, without the GPU.

torch.compile runs completely: Dynamo, AOTAutograd and Inductor work on tensors without memory on
`cuda:0`. torch is made to look like a ROCm build, and reads the GPU's properties from
conf/hardware. The kernels, their block sizes and their warps therefore match ROCm's torch of the
same version. Three parts do not exist in a CPU build of torch and are replaced here: the device
guard, the driver's answers, and autograd's engine, which needs streams.

This needs torch's CPU build (2.13), Triton and transformers. It does not compile or launch kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from recipes.rank.device import DTYPES
from recipes.tune.amdgpu import ARCHITECTURES, MAX_THREADS

HARDWARE = Path(__file__).resolve().parents[2] / "conf/hardware"
SEQUENCES = 2  # rows in a padded batch
# Abbreviations in the names of Inductor's kernels
KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction"}
# A line in the source of every kernel, which fails without a GPU and is therefore removed.
DRIVER = "triton_helpers.set_driver_to_gpu()\n"


@dataclass(frozen=True)
class Layer:
    """A decoder layer of a model in conf/model, and the batch that it is compiled for."""

    model: Path
    attention: str  # a key of ATTENTIONS
    tokens: int
    dtype: str  # a key of DTYPES, or `amp` for fp32 weights under bf16 autocast


@dataclass(frozen=True)
class Generated:
    """One configuration of a kernel, as plain data that can be sent between processes."""

    layer: Layer
    label: str  # such as "forward 3 reduction"
    function: str
    source: str
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def generate_all(layers: Mapping[str, Sequence[Layer]], jobs: int) -> dict[str, list[Generated]]:
    """Return the kernels of each architecture's layers.

    Each architecture has its own process, because torch caches the properties of the GPU.
    """
    with ProcessPoolExecutor(
        min(jobs, len(layers)), mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return dict(zip(layers, pool.map(generate, layers.values(), layers), strict=True))


def generate(layers: Sequence[Layer], arch: str) -> list[Generated]:
    """Return the layers' kernels. Call this once per process, because torch stays changed."""
    stand_in_for_gpu(arch)
    return [kernel for layer in layers for kernel in kernels_of(layer)]


# ---- Stand-ins for the GPU


def stand_in_for_gpu(arch: str) -> None:
    torch.version.hip = "7.2"  # this is how Inductor recognizes ROCm when it is imported
    # Use meta's device guard, which does nothing, for `cuda` too.
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = (int(getattr(torch._C._autograd.DeviceType, name)) for name in ("CUDA", "Meta"))
    guards[cuda] = guards[meta]
    pretend_device(device_properties(arch))
    import triton.runtime
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", arch, ARCHITECTURES[arch].wave_size)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    torch.autograd.grad = gradients


def device_properties(arch: str) -> SimpleNamespace:
    """Return the properties of the first GPU of this architecture in conf/hardware."""
    gpu, limits = hardware_of(arch), ARCHITECTURES[arch]
    return SimpleNamespace(
        name=gpu["product"],
        gcnArchName=arch,
        major=int(arch[3:-2]),
        minor=int(arch[-2], 16),
        # On RDNA, HIP counts workgroup processors, which have two compute units each.
        multi_processor_count=gpu["compute_units"] // (1 if limits.wave_size == 64 else 2),
        warp_size=limits.wave_size,
        regs_per_multiprocessor=limits.vgprs * limits.simds * limits.wave_size,
        max_threads_per_multi_processor=2048,  # HIP's figure for all architectures
        max_threads_per_block=MAX_THREADS,
        shared_memory_per_block=limits.lds_max_bytes,
        total_memory=gpu["memory_gb"] * 2**30,
    )


@functools.cache
def hardware_of(arch: str) -> dict[str, Any]:
    """Return the content of the first file in conf/hardware for this architecture."""
    gpus = map(read_hardware, sorted(HARDWARE.glob("*.yaml")))
    return next(gpu for gpu in gpus if gpu.get("gfx") == arch)


def read_hardware(file: Path) -> dict[str, Any]:
    """Return the top-level keys of a file in conf/hardware and in its base files."""
    content, gpu = yaml.safe_load(file.read_text()), dict[str, Any]()
    for base in content.pop("defaults", []):
        if base != "_self_":
            gpu |= read_hardware(file.parent / f"{base.removesuffix('@_here_')}.yaml")
    return gpu | content


def attentions_of(arch: str) -> tuple[str, ...]:
    """Return the attention for padded rows and, if the hardware file has one, for packed rows."""
    gpu = hardware_of(arch)
    padded = gpu["attention"]
    if padded == "sdpa":
        padded = "flash" if gpu.get("fused_attention", True) else "math"
    return (padded, "varlen") if gpu.get("packed_attention") == "varlen" else (padded,)


def pretend_device(properties: SimpleNamespace) -> None:
    """Make torch's queries of the driver return `properties`."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_rng_state": torch.get_rng_state(),
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), 0),
        **dict.fromkeys(("set_rng_state", "synchronize")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # generated code imports it
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("device_count", "current_device", "get_device_properties"):
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    # Inductor calls these operators to fold constants. They exist as long as the library does.
    global constant_operators
    constant_operators = torch.library.Library("aten", "IMPL", "CUDA")
    for name, operator in (("full", torch.full), ("scalar_tensor", torch.scalar_tensor)):
        constant_operators.impl(
            name, lambda *args, operator=operator, dtype=None, **_: operator(*args, dtype=dtype)
        )


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Compute torch.autograd.grad without autograd's engine, which needs streams."""
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in inputs]
    roots = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in outputs]
    ends = {edge.node for edge in edges}
    sums: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)  # node -> input -> gradient
    for root, grad in zip(roots, grad_outputs, strict=True):
        accumulate(sums[root.node], root.node, root.output_nr, grad)
    with torch.no_grad():
        for node in nodes_between([root.node for root in roots], ends):
            call = node if callable(node) else node.apply  # varlen_attn's node is a Python one
            grads = call(*[sums[node].get(i) for i in range(len(node._input_metadata))])
            grads = grads if isinstance(grads, tuple) else (grads,)
            # strict=False, because a Python node also returns None for arguments that are not
            # tensors. varlen_attn's tensors are its first arguments.
            for (next_node, number), grad in zip(node.next_functions, grads, strict=False):
                if next_node is not None:
                    accumulate(sums[next_node], next_node, number, grad)
    return tuple(sums[edge.node].get(edge.output_nr) for edge in edges)


def accumulate(
    sums: dict[int, torch.Tensor], node: Any, number: int, grad: torch.Tensor | None
) -> None:
    """Add a gradient to a node's input, in the shape and dtype of that input."""
    if grad is None:
        return
    like = node._input_metadata[number]
    grad = grad.sum_to_size(like.shape).to(like.dtype)
    sums[number] = sums[number] + grad if number in sums else grad


def nodes_between(roots: list[Any], ends: set[Any]) -> list[Any]:
    """Return the graph's nodes from roots to ends, in reverse order of the forward pass."""
    nodes, stack = set(), list(roots)
    while stack:
        node = stack.pop()
        if node not in nodes | ends:
            nodes.add(node)
            stack += [next_node for next_node, _ in node.next_functions if next_node is not None]
    # The gradients of leaves other than the ends are not needed.
    inner = [node for node in nodes if node.next_functions]
    return sorted(inner, key=lambda node: node._sequence_nr(), reverse=True)


# ---- The layer and its kernels


def kernels_of(layer: Layer) -> list[Generated]:
    """Return all configurations of all kernels in the layer's forward and backward passes."""
    from torch._inductor.codecache import PyCodeCache

    kernels = []
    for label, function, source in sources_of(layer):
        tuner = getattr(PyCodeCache.load(source.replace(DRIVER, "")), function)
        for config in tuner.configs:
            meta = tuner._create_compile_meta(config)
            options = tuner._create_compile_options(config, meta)
            fields = (meta["signature"], meta["constants"], meta["configs"][0], options)
            kernels.append(Generated(layer, label, function, source, *fields))
    return kernels


def sources_of(layer: Layer) -> list[tuple[str, str, str]]:
    """Compile the layer as in training, and return label, name and source of each kernel.

    The sequence dimension is dynamic.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor import compile_fx
    from torch._inductor.async_compile import AsyncCompile
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    # Compile the backward pass immediately after the forward pass.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # (direction, name) -> source; a dict, because Inductor imports each kernel twice
    sources: dict[tuple[str, str], str] = {}
    direction = ["forward"]

    def record(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> None:
        sources[direction[0], name] = source

    def compile_one(graph: Any, examples: Any, **options: Any) -> Callable[..., Any]:
        direction[0] = "backward" if options.get("is_backward") else "forward"
        compile_fx.compile_fx_inner(graph, examples, **options)
        return stop

    def stop(*_: Any) -> None:
        raise Finished

    AsyncCompile.triton, AsyncCompile.wait = record, lambda self, scope: None
    torch._dynamo.reset()
    with FakeTensorMode():
        with torch.device("cuda:0"):
            run, arguments = build(layer)
        backend = functools.partial(compile_fx.compile_fx, inner_compile=compile_one)
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        with contextlib.suppress(Finished):
            compiled(**arguments)
    return [
        (f"{way} {name.rpartition('_')[2]} {KINDS.get(name.split('_')[1], name)}", name, source)
        for (way, name), source in sources.items()
    ]


class Finished(Exception):
    """Raised in place of calling the compiled layer, when all kernels are generated."""


def build(layer: Layer) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the layer's forward pass and its arguments, with dynamic sequence dimensions."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, ATTENTIONS[layer.attention])
    dtype, config = DTYPES.get(layer.dtype, torch.float32), config_of(layer.model)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    module = model.train().model.layers[0]
    rows = 1 if layer.attention == "varlen" else SEQUENCES
    length = layer.tokens // rows
    hidden = torch.empty(rows, length, config.hidden_size, dtype=dtype, requires_grad=True)
    angles = [torch.empty(rows, length, config.head_dim, dtype=dtype) for _ in range(2)]
    for tensor in (hidden, *angles):
        torch._dynamo.mark_dynamic(tensor, 1)
    more: dict[str, Any] = {}
    if layer.attention == "varlen":
        more = {"boundaries": torch.empty(9, dtype=torch.int32), "longest": length}
        torch._dynamo.mark_dynamic(more["boundaries"], 0)
    if layer.attention == "eager":
        more = {"attention_mask": torch.empty(rows, 1, length, length, dtype=dtype)}
        for dimension in (2, 3):
            torch._dynamo.mark_dynamic(more["attention_mask"], dimension)

    def forward(hidden: torch.Tensor, angles: list[torch.Tensor], **more: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=layer.dtype == "amp"):
            return module(hidden, position_embeddings=tuple(angles), **more)

    return forward, {"hidden": hidden, "angles": angles, **more}


def config_of(model: Path) -> Any:
    """Return transformers' configuration of one layer, with a small vocabulary."""
    # Imported after stand_in_for_gpu, because these may import Inductor.
    from omegaconf import OmegaConf

    from recipes.models.model_build import model_config

    small = {"num_layers": 1, "vocab_size": 64}
    return model_config(OmegaConf.merge({"attention_bias": False}, OmegaConf.load(model), small))


# ---- Attention

ATTENTION = "layer_kernels"  # name under which transformers finds it
Tensor = torch.Tensor
Attended = tuple[Tensor, None]


def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: None, **__: Any) -> Attended:
    call = torch.ops.aten._scaled_dot_product_flash_attention
    out = call(q, k, v, 0.0, True, scale=module.scaling)[0]
    return out.transpose(1, 2).contiguous(), None


def math(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: None, **__: Any) -> Attended:
    call, gqa = torch.ops.aten._scaled_dot_product_attention_math, k.shape[1] != q.shape[1]
    out = call(q, k, v, None, 0.0, True, scale=module.scaling, enable_gqa=gqa)[0]
    return out.transpose(1, 2).contiguous(), None


def eager(module: Any, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return sys.modules[type(module).__module__].eager_attention_forward(module, *arguments, **named)


def varlen(module: Any, *qkv: Any, boundaries: Tensor, longest: int, **_: Any) -> Attended:
    from torch.nn.attention.varlen import varlen_attn

    from recipes.models.packed_attention import SHARED_KEYS  # imports Inductor

    packed = [tensor.transpose(1, 2).squeeze(0) for tensor in qkv[:3]]
    causal = {"window_size": (-1, 0), "scale": module.scaling, **SHARED_KEYS}
    out = varlen_attn(*packed, boundaries, boundaries, longest, longest, **causal)
    return out.unsqueeze(0), None


# SDPA with and without fused kernels, transformers' eager method, and packed rows
ATTENTIONS: dict[str, Callable[..., Any]] = {
    attention.__name__: attention for attention in (flash, math, eager, varlen)
}
