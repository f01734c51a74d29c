"""Patch libraries so that trainers with FSDP2, ZeRO, fp16 or a vLLM server run without a GPU."""

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
    """Patch the libraries. Call this before creating any TrainingArguments."""
    if config.topology.servers:
        from trl.generation import vllm_generation

        vllm_generation.VLLMClient = gloo_client()
    if config.hardware.vendor != "none":
        return
    # accelerate imports DeepSpeed under every strategy, and DeepSpeed warns if there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # accelerate would use cpu:0 for several ranks, but torch.load cannot restore optimizers there.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if config.topology.strategy not in ("none", "ddp"):
        # On a CPU, accelerate would silently replace FSDP and DeepSpeed by DDP, so report several
        # GPUs. transformers then asks whether the GPU supports bf16; the CPU does.
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        training_args.is_torch_bf16_gpu_available = lambda: True
    if config.topology.strategy.startswith("zero"):
        import deepspeed

        # Do not compile CPU collectives for inference, which takes g++ and 26 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if config.precision.compute == "fp16":
        enable_fp16()


def enable_fp16() -> None:
    """Make accelerate train in fp16 with a scaled loss on a CPU, where it would use fp32."""
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


def gloo_client() -> type:
    """Return TRL's client of a vLLM server, changed to send weights over gloo."""
    from trl.generation.vllm_client import VLLMClient

    from recipes.smoke.gloo_server import join

    class GlooVLLMClient(VLLMClient):
        over_gloo = True

        def init_communicator(self, device: Any = "cpu") -> None:
            world_size = self.get_world_size() + 1
            address = os.environ.get("VLLM_HOST_IP", "127.0.0.1")  # as in TRL's client
            info = {
                "master_address": address,
                "master_port": self.group_port,
                "rank_offset": 1,
                "world_size": world_size,
            }
            # With this variable, the store of the new group would wait for torchrun's store.
            agent = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            try:
                with ThreadPoolExecutor(max_workers=1) as executor:
                    response = executor.submit(
                        self._post,
                        f"{self.base_url}/init_weight_transfer_engine",
                        json={"init_info": info},
                    )
                    self.communicator = join(address, self.group_port, 0, world_size)
                    response.result()
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
                response = executor.submit(
                    self._post, f"{self.base_url}/update_weights", json={"update_info": info}
                )
                try:
                    for _name, weight in named_params:
                        self.communicator.broadcast(weight.detach().cpu().contiguous(), 0).wait()
                finally:
                    response.result()  # the reason why the server has not received a weight
            if not self._updating_weights:
                self._finish_weight_update()

        def close_communicator(self) -> None:
            self.communicator = None

    return GlooVLLMClient
