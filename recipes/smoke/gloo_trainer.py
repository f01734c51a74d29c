"""The trainer's side: TRL's client with its weight transfer over gloo, and accelerate's FSDP2 and ZeRO on ranks without a GPU."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from transformers import training_args


def use(config) -> None:
    """Before any TrainingArguments are made."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports DeepSpeed whatever the strategy; it looks for a GPU, and warns
    # Of several ranks accelerate says cpu:0, by which torch.load cannot restore an optimizer: no run of theirs could be resumed.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if config.topology.strategy not in ("none", "ddp"):
        _real_strategies()
    if config.topology.strategy.startswith("zero"):
        _without_shared_memory()
    if config.precision.compute == "fp16":
        _scaled_halves()
    if config.topology.servers:
        use_server()


def use_server() -> None:
    """Have TRL's trainers send weights over gloo."""
    from trl.generation import vllm_generation

    vllm_generation.VLLMClient = _client()


def _real_strategies() -> None:
    """accelerate turns FSDP and DeepSpeed on a CPU into DDP without a word: it asks for a device of several GPUs.

    transformers then asks the GPU whether it computes in bf16, which a CPU does.
    """
    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    training_args.is_torch_bf16_gpu_available = lambda: True


def _scaled_halves() -> None:
    """accelerate casts to fp16 and scales the loss on GPUs only; on a CPU it would train in fp32 without a word. torch does both there."""
    init = Accelerator.__init__

    @functools.wraps(init)
    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler("cpu", **(self.scaler_handler.to_kwargs() if self.scaler_handler else {}))

    Accelerator.__init__ = with_scaler


def _without_shared_memory() -> None:
    """Without DeepSpeed's own collectives for a CPU: they serve its inference, and are compiled first, which takes g++ and 26 s."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _client() -> type:
    from trl.generation.vllm_client import VLLMClient

    from recipes.smoke.gloo_server import join

    class GlooVLLMClient(VLLMClient):
        def init_communicator(self, device: Any = "cpu") -> None:
            world_size = self.get_world_size() + 1
            info = {"master_address": "127.0.0.1", "master_port": self.group_port, "rank_offset": 1, "world_size": world_size}
            # Under torchrun a store made here would be taken for the agent's, and wait for it.
            agent = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            try:
                with ThreadPoolExecutor(max_workers=1) as executor:
                    answer = executor.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
                    self.communicator = join("127.0.0.1", self.group_port, 0, world_size)
                    answer.result()
            finally:
                if agent is not None:
                    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = agent
            atexit.register(self.close_communicator)

        def update_named_params(self, metadata: list, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            if not self._updating_weights:
                self._start_weight_update()
            with ThreadPoolExecutor(max_workers=1) as executor:
                answer = executor.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": info})
                for _name, weight in named_params:
                    self.communicator.broadcast(weight.detach().cpu().contiguous(), 0).wait()
                answer.result()
            if not self._updating_weights:
                self._finish_weight_update()

        def close_communicator(self) -> None:
            self.communicator = None

    return GlooVLLMClient
