"""Test DDP's gradients and FSDP's gathers, with the real DDP and FSDP2 in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.training.communication import LeanCommunication

STEPS, MICRO_BATCHES, LAYERS = 3, 4, 2


class Parts:
    """The parts of transformers' Trainer that the mixin extends."""

    def __init__(self, strategy: DistributedType, reshards: bool = True) -> None:
        plugin = SimpleNamespace(reshard_after_forward=reshards)
        self.accelerator = SimpleNamespace(
            distributed_type=strategy, state=SimpleNamespace(fsdp_plugin=plugin)
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))

    def _build_accelerator_args(self) -> dict[str, Any]:
        return {"kwargs_handlers": [DistributedDataParallelKwargs()]}

    def _prepare_for_training(self) -> tuple[nn.Module, None]:
        if self.accelerator.distributed_type == DistributedType.MULTI_CPU:
            (handler,) = self._build_accelerator_args()["kwargs_handlers"]
            return DistributedDataParallel(self.model, **handler.to_kwargs()), None
        reshards = self.accelerator.state.fsdp_plugin.reshard_after_forward
        for layer in self.model:
            fully_shard(layer, reshard_after_forward=reshards)
        return fully_shard(self.model, reshard_after_forward=reshards), None

    def training_step(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).square().sum()
        loss.backward()
        return loss.detach()

    def evaluate(self) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": self.model(batches()[0, 0]).sum().item()}


class Trainer(LeanCommunication, Parts):
    pass


@pytest.fixture
def group(request, tmp_path):
    backend, ranks, options = request.param
    if backend == "gloo":
        options = {"init_method": f"file://{tmp_path}/join"}
    dist.init_process_group(backend, rank=0, world_size=ranks, **options)
    yield
    dist.destroy_process_group()


def batches():
    torch.manual_seed(1)
    return torch.randn(STEPS, MICRO_BATCHES, 5, 8)


@pytest.mark.parametrize("group", [("gloo", 1, {})], indirect=True)
def test_all_gradients_of_ddp_are_in_its_buckets(group):
    trainer = Trainer(DistributedType.MULTI_CPU)
    model, _ = trainer._prepare_for_training()
    expected = Parts(DistributedType.MULTI_CPU).model
    buckets = set()
    model.zero_grad()
    for step in batches():
        expected.zero_grad()
        for number, rows in enumerate(step):
            model.require_backward_grad_sync = number == MICRO_BATCHES - 1
            trainer.training_step(model, rows)
            expected(rows).square().sum().backward()
            gradients = [weight.grad for weight in model.parameters()]
            buckets.add(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
            for ours, weight in zip(gradients, expected.parameters(), strict=True):
                torch.testing.assert_close(ours, weight.grad)
        model.zero_grad()
    assert buckets == {1}


@pytest.mark.parametrize("group", [("fake", 2, {"store": FakeStore()})], indirect=True)
@pytest.mark.parametrize(
    ("reshards", "gathers"), [(True, 2 * LAYERS * MICRO_BATCHES), (False, LAYERS)]
)
def test_fsdp_gathers_once_in_a_step_if_weights_stay_gathered(group, reshards, gathers):
    trainer = Trainer(DistributedType.FSDP, reshards)
    model, _ = trainer._prepare_for_training()
    for step in batches():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for number, rows in enumerate(step):
                trainer.accelerator.sync_gradients = number == MICRO_BATCHES - 1
                model.set_requires_gradient_sync(trainer.accelerator.sync_gradients)
                trainer.training_step(model, rows)
        names = [event.name for event in profile.events()]
        assert sum(name.startswith("FSDP::all_gather (") for name in names) == gathers
        model.zero_grad()


@pytest.mark.parametrize("group", [("fake", 2, {"store": FakeStore()})], indirect=True)
def test_weights_are_sharded_after_an_evaluation(group):
    trainer = Trainer(DistributedType.FSDP, reshards=False)
    trainer._prepare_for_training()
    trainer.evaluate()
    assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
