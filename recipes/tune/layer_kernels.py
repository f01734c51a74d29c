"""Generate the Triton kernels of one compiled decoder layer for an AMD GPU without having one.

torch.compile runs completely: Dynamo, AOTAutograd and Inductor work on tensors without memory on
`cuda:0`, in a process where torch behaves as a ROCm build and finds the properties of a GPU in
conf/hardware. So the kernels, their block sizes and warps are those of ROCm's torch of the same
version. Nothing is captured on CUDA. Three parts are missing from a CPU build of torch and replaced
here: a device guard, the driver's answers, and autograd's engine, which needs streams.

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
SEQUENCES = 2  # rows of a batch that is not packed
# Inductor's abbreviations in the names of kernels
KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction"}
# A line in every kernel's source that fails without a GPU.
DRIVER = "triton_helpers.set_driver_to_gpu()\n"


@dataclass(frozen=True)
class Layer:
    """Describe a decoder layer of a model in conf/model. `amp`: fp32 weights, bf16 autocast."""

    model: Path
    attention: str  # a key of ATTENTIONS
    tokens: int
    dtype: str


@dataclass(frozen=True)
class Generated:
    """Hold one configuration of a kernel as plain data, which can be sent between processes."""

    layer: Layer
    label: str  # forward 3 reduction
    function: str
    source: str
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def generate_all(layers: Mapping[str, Sequence[Layer]], jobs: int) -> dict[str, list[Generated]]:
    """Return the kernels of each architecture's layers.

    Each architecture has its own process, because torch remembers its GPU.
    """
    with ProcessPoolExecutor(
        min(jobs, len(layers)), mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return dict(zip(layers, pool.map(generate, layers.values(), layers), strict=True))


def generate(layers: Sequence[Layer], arch: str) -> list[Generated]:
    """Return the layers' kernels. Call once per process, since changes to torch are not undone."""
    stand_in_for_gpu(arch)
    return [kernel for layer in layers for kernel in kernels_of(layer)]


# ---- Stand-ins for the GPU


def stand_in_for_gpu(arch: str) -> None:
    torch.version.hip = "7.2"  # the only value that Inductor reads; set before its import
    # Register for `cuda` the guard of `meta`, which does nothing; CUDA builds have their own.
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
        # On RDNA, HIP counts workgroup processors, of two compute units each.
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
    """Return a file of conf/hardware over its bases. Nested values are neither merged nor read."""
    own, gpu = yaml.safe_load(file.read_text()), dict[str, Any]()
    for base in own.pop("defaults", []):
        if base != "_self_":
            gpu |= read_hardware(file.parent / f"{base.removesuffix('@_here_')}.yaml")
    return gpu | own


def attentions_of(arch: str) -> tuple[str, ...]:
    """Return the hardware file's attention for padded rows and, if any, for packed rows."""
    gpu = hardware_of(arch)
    padded = gpu["attention"]
    if padded == "sdpa":
        padded = "flash" if gpu.get("fused_attention", True) else "math"
    return (padded, "varlen") if gpu.get("packed_attention") == "varlen" else (padded,)


def pretend_device(properties: SimpleNamespace) -> None:
    """Replace torch's queries of the driver by answers from `properties`."""
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
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # imported by generated wrappers
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("device_count", "current_device", "get_device_properties"):
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    global folding  # operators only exist while their library does
    # Inductor computes the constants that it folds, so these operators must work
    folding = torch.library.Library("aten", "IMPL", "CUDA")
    folding.impl("full", lambda *args, dtype=None, **_: torch.full(*args, dtype=dtype))
    scalar = torch.scalar_tensor
    folding.impl("scalar_tensor", lambda *args, dtype=None, **_: scalar(*args, dtype=dtype))


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of torch.autograd.grad without its engine, which needs streams."""
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in inputs]
    roots = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in outputs]
    ends = {edge.node for edge in edges}
    arrived: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
    for root, grad in zip(roots, grad_outputs, strict=True):
        accumulate(arrived[root.node], root.node, root.output_nr, grad)
    with torch.no_grad():
        for node in nodes_from([root.node for root in roots], ends):
            call = node if callable(node) else node.apply  # C++'s, or Python's of varlen_attn
            grads = call(*[arrived[node].get(i) for i in range(len(node._input_metadata))])
            grads = grads if isinstance(grads, tuple) else (grads,)
            # A node in Python also returns None for each argument that is not a tensor; the tensors
            # of varlen_attn are its first arguments.
            for (following, number), grad in zip(node.next_functions, grads, strict=False):
                if following is not None:
                    accumulate(arrived[following], following, number, grad)
    return tuple(arrived[edge.node].get(edge.output_nr) for edge in edges)


def accumulate(
    arrived: dict[int, torch.Tensor], node: Any, number: int, grad: torch.Tensor | None
) -> None:
    """Add a gradient to those of a node, in its input's shape and dtype, as the engine does."""
    if grad is None:
        return
    like = node._input_metadata[number]
    grad = grad.sum_to_size(like.shape).to(like.dtype)
    arrived[number] = arrived[number] + grad if number in arrived else grad


def nodes_from(roots: list[Any], ends: set[Any]) -> list[Any]:
    """Return the nodes between roots and ends in reverse order of the forward pass."""
    nodes, stack = set(), list(roots)
    while stack:
        node = stack.pop()
        if node not in nodes | ends:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions if following is not None]
    inner = [node for node in nodes if node.next_functions]  # the gradients of leaves are not used
    return sorted(inner, key=lambda node: node._sequence_nr(), reverse=True)


# ---- The layer and its kernels


def kernels_of(layer: Layer) -> list[Generated]:
    """Return every configuration of every kernel of the layer's forward and backward pass."""
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
    """Return label, name and source of each kernel, in order.

    The layer is compiled as in training, with a dynamic sequence dimension.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor import compile_fx
    from torch._inductor.async_compile import AsyncCompile
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    # Compile the backward pass together with the forward pass.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    sources: dict[tuple[str, str], str] = {}  # by direction and name; Inductor imports twice
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
    """Stop once everything is generated, when the compiled layer would be called."""


def build(layer: Layer) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the layer's forward pass and its arguments; mark sequence dimensions as dynamic."""
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
    # Imported after stand_in_for_gpu, since these may import Inductor.
    from omegaconf import OmegaConf

    from recipes.models.model_build import model_config

    small = {"num_layers": 1, "vocab_size": 64}
    return model_config(OmegaConf.merge({"attention_bias": False}, OmegaConf.load(model), small))


# ---- Attention: SDPA with and without fused kernels, transformers' eager method, packed rows

ATTENTION = "of_the_kernel_gate"
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

    packed = [tensor.transpose(1, 2).squeeze(0) for tensor in qkv[:3]]
    causal = {"window_size": (-1, 0), "scale": module.scaling, "enable_gqa": True}
    out = varlen_attn(*packed, boundaries, boundaries, longest, longest, **causal)
    return out.unsqueeze(0), None


ATTENTIONS: dict[str, Callable[..., Any]] = {
    attention.__name__: attention for attention in (flash, math, eager, varlen)
}
