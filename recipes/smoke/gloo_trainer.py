"""Run trainers without a GPU: TRL's weight transfer over gloo, and accelerate's FSDP2 and ZeRO."""

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
from omegaconf import DictConfig
from transformers import training_args


def use(config: DictConfig) -> None:
    """Patch the libraries, before any TrainingArguments are made."""
    if config.topology.servers:
        from trl.generation import vllm_generation

        vllm_generation.VLLMClient = _client()
    if config.hardware.vendor != "none":
        return
    # accelerate imports DeepSpeed under any strategy, and DeepSpeed warns if it finds no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # For several ranks accelerate uses cpu:0, with which torch.load cannot restore an optimizer.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if config.topology.strategy not in ("none", "ddp"):
        # Keep FSDP and DeepSpeed on a CPU, where accelerate would silently use DDP, by reporting
        # several GPUs. transformers then tests the GPU for bf16, which the CPU supports.
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        training_args.is_torch_bf16_gpu_available = lambda: True
    if config.topology.strategy.startswith("zero"):
        import deepspeed

        # CPU collectives for inference need g++ and 26 s to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if config.precision.compute == "fp16":
        _scaled_halves()


def _scaled_halves() -> None:
    """Cast to fp16 and scale the loss on a CPU, where accelerate would train in fp32."""
    init = Accelerator.__init__

    @functools.wraps(init)
    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler(
                "cpu", **(self.scaler_handler.to_kwargs() if self.scaler_handler else {})
            )

    Accelerator.__init__ = with_scaler


def _client() -> type:
    from trl.generation.vllm_client import VLLMClient

    from recipes.smoke.gloo_server import join

    class GlooVLLMClient(VLLMClient):
        def init_communicator(self, device: Any = "cpu") -> None:
            world_size = self.get_world_size() + 1
            info = {
                "master_address": "127.0.0.1",
                "master_port": self.group_port,
                "rank_offset": 1,
                "world_size": world_size,
            }
            # Under torchrun, a store made here would be treated as the agent's, and wait for it.
            agent = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            try:
                with ThreadPoolExecutor(max_workers=1) as executor:
                    answer = executor.submit(
                        self._post,
                        f"{self.base_url}/init_weight_transfer_engine",
                        json={"init_info": info},
                    )
                    self.communicator = join("127.0.0.1", self.group_port, 0, world_size)
                    answer.result()
            finally:
                if agent is not None:
                    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = agent
            atexit.register(self.close_communicator)

        def update_named_params(
            self, metadata: list, named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            if not self._updating_weights:
                self._start_weight_update()
            with ThreadPoolExecutor(max_workers=1) as executor:
                answer = executor.submit(
                    self._post, f"{self.base_url}/update_weights", json={"update_info": info}
                )
                for _name, weight in named_params:
                    self.communicator.broadcast(weight.detach().cpu().contiguous(), 0).wait()
                answer.result()
            if not self._updating_weights:
                self._finish_weight_update()

        def close_communicator(self) -> None:
            self.communicator = None

    return GlooVLLMClient
