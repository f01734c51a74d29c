"""Receive weights over gloo, as a plugin for vLLM, whose own transfers need a GPU per process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "gloo"


def register() -> None:
    """Register the engine. vLLM calls this in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The address of the trainer (rank 0), and the rank of vLLM's first worker in the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, NCCLWeightTransferUpdateInfo]):
    """Receive each tensor by broadcast, and load it like a tensor of a checkpoint."""

    init_info_cls = GlooInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = (
            init_info.rank_offset
            + parallel.data_parallel_index * parallel.world_size
            + parallel.rank
        )
        self.group = join(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        # The base class would also synchronize an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        for name, dtype, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, strict=True
        ):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weight, 0).wait()
            self.model.load_weights([(name, weight.to(self.device))])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Raise NotImplementedError. vLLM 0.26 requires this method, but gloo_trainer sends."""
        raise NotImplementedError


def join(host: str, port: int, rank: int, world_size: int) -> ProcessGroup:
    """Create a group separate from torch.distributed's, and return it when all have joined."""
    return stateless_init_torch_distributed_process_group(
        host, port, rank, world_size, backend="gloo"
    )
