"""Count the bytes of a training micro-step on fake tensors, without a GPU."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from trl.kernels import chunked_logprob

from recipes.models import head

ALIGNED = 512  # bytes that CUDA's allocator rounds up to


class Counter(TorchDispatchMode):
    """Count the bytes of living tensors, and their maximum since `peak` was last set."""

    def __init__(self, sums: tuple[int, int]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: Any = WeakIdKeyDictionary()
        # Shape of a tied head's gradient. Without this mode, autograd adds the gradient of the
        # embedding in place.
        self.sums = sums

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                in_place = (
                    function is torch.ops.aten.add.Tensor and tuple(tensor.shape) == self.sums
                )
                self._add(
                    tensor.untyped_storage(),
                    0 if in_place else -(-tensor.untyped_storage().nbytes() // ALIGNED) * ALIGNED,
                )
        return out

    def _add(self, storage: Any, size: int) -> None:
        self.seen[storage] = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.alive -= size


@contextlib.contextmanager
def as_on_a_gpu(monkeypatch: Any) -> Any:
    """Make torch on a CPU allocate the same bytes as on a GPU.

    There is no causal mask, the tiles of the head are computed in place, and the mask of dropout
    has one byte per element. peft does not move weights, because fake weights cannot be swapped.
    """
    for module in (modeling_llama, modeling_qwen2, modeling_qwen3):
        monkeypatch.setattr(module, "create_causal_mask", lambda **_: None)
    for name in ("_forward_tile", "_backward_tile"):
        monkeypatch.setattr(chunked_logprob, name, lambda *_, **__: None)
    monkeypatch.setattr(chunked_logprob, "_addmm_fp32", lambda *_: None)
    monkeypatch.setattr(
        torch.nn.functional,
        "dropout",
        lambda x, p, training, _: torch.native_dropout(x, p, training)[0],
    )
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
    yield


def model_of(shape: SimpleNamespace, numerics: str) -> Any:
    config = AutoConfig.for_model(
        shape.architecture,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16 if numerics == "cast" else torch.float32
    ).train()


def autocast(numerics: str) -> Any:
    return (
        contextlib.nullcontext()
        if numerics == "fp32"
        else torch.autocast("cpu", dtype=torch.bfloat16)
    )


def loss_of(model: Any, numerics: str, rows: int, length: int) -> torch.Tensor:
    """Return the loss of SFT for a model with our head (recipes/models/head.py)."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    positions = torch.arange(rows * length)
    with autocast(numerics):
        loss: torch.Tensor = model(
            input_ids=tokens, targets=tokens.flatten(), target_positions=positions
        ).loss
    return loss


def saved_when_compiled(shape: SimpleNamespace, numerics: str, rows: int, length: int) -> float:
    """Return the bytes of activations that inductor's partitioner saves for the backward."""
    saved: dict[Any, int] = {}

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        for node in output.args[0][kwargs["num_fwd_outputs"] :]:
            value = node.meta.get("val")
            # Exclude weights and their copies, whose sizes are not multiples of the tokens.
            if (
                isinstance(value, torch.Tensor)
                and node.op != "placeholder"
                and value.numel() % (rows * length) == 0
            ):
                saved[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return forward, backward

    def no_compiler(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=no_compiler,
        bw_compiler=no_compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = torch.compile(model_of(shape, numerics).model, backend=backend)
        with autocast(numerics):
            model(input_ids=torch.zeros(rows, length, dtype=torch.long))
    return float(sum(saved.values()))


def _with_adapter(model: Any, adapter: dict[str, Any], casts: bool) -> Any:
    """Add an adapter of peft. With `casts`, cast its weights to 16 bits as a strategy does."""
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=32, **adapter)
    ).train()
    for parameter in adapted.parameters() if casts else []:
        parameter.data = parameter.data.to(torch.bfloat16)
    return adapted


def micro_step(
    shape: SimpleNamespace,
    numerics: str,
    rows: int,
    length: int,
    checkpointing: bool,
    accumulates: bool,
    adapter: dict[str, Any] | None = None,
    casts: bool = False,
) -> float:
    """Return the peak bytes of forward and backward in SFT, without weights and gradients."""
    counter = Counter((shape.vocab_size, shape.hidden_size))
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model = base = model_of(shape, numerics)
        if adapter:
            model = _with_adapter(base, adapter, casts)
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
            if adapter:
                base.enable_input_require_grads()
        head.add(base)
        if accumulates:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)
        before = counter.peak = counter.alive
        loss_of(model, numerics, rows, length).backward()
    return counter.peak - before
