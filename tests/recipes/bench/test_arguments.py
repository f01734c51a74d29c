"""Test the bounds of arguments, which a rank checks as the launcher does."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from launch.core.errors import UserError
from recipes.bench import vllm_arguments
from recipes.bench.attention import AttentionConfig
from recipes.bench.collectives import CollectivesConfig
from recipes.bench.dataloader import DataloaderConfig
from recipes.bench.gemm import GemmConfig
from recipes.bench.matmul import MatmulConfig
from recipes.bench.scaling import ScalingConfig
from recipes.bench.transformer import TransformerConfig
from recipes.bench.vllm_engine import EngineConfig
from recipes.tune.batch import BatchConfig
from recipes.tune.inductor import InductorConfig
from recipes.tune.rccl import RcclConfig
from recipes.tune.search import SearchConfig
from recipes.tune.tuning import TrainingTuneConfig
from recipes.tune.vllm import VllmConfig

LENGTHS = {"lengths": [[16, 8]]}
HALF = {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(("cls", "given", "words"), [
    # Whole numbers: from 1, some from 0 or 2.
    (MatmulConfig, {"sizes": [64, 0]}, "sizes=[64, 0]: each at least 1"),
    (MatmulConfig, {"sizes": OmegaConf.create([64, 0])}, "sizes=[64, 0]: each"),  # as on a rank
    (TransformerConfig, {"batch": 0}, "batch=0: at least 1"),
    (TransformerConfig, {"warmup": -1}, "warmup=-1: at least 0"),
    (DataloaderConfig, {"warmup": 0}, "warmup=0: at least 1"),
    (DataloaderConfig, {"num_workers": [-1]}, "at least 0"),
    (CollectivesConfig, {"factor": 1}, "factor=1: at least 2"),
    (CollectivesConfig, {"ranks": [1, 2]}, "ranks=[1, 2]: each at least 2"),
    (TrainingTuneConfig, {"warmup": 0}, "warmup=0: at least 1"),
    (SearchConfig, {"num_trials": 1}, "num_trials=1: at least 2"),
    (BatchConfig, {"batches": [0]}, "batches=[0]"),
    # Names.
    (AttentionConfig, {"backends": ["flahs"]}, "flash"),
    (TransformerConfig, {"attention": "flash"}, "attention=flash: unknown. Known: eager, sdpa"),
    (ScalingConfig, {"models": ["7c"]}, "models=7c"),
    (InductorConfig, {"candidates": ["freezing"]}, "without gradients only"),
    (RcclConfig, {"recipe": "sft"}, "Known: bench/collectives"),
    (VllmConfig, {"recipe": "sft"}, "Known: bench/vllm"),
    # What one benchmark alone needs.
    (CollectivesConfig, {"min_bytes": 31}, "min_bytes=31: at least 32 for 8 ranks"),
    (CollectivesConfig, {"min_bytes": 2**40}, "at most max_bytes"),
    (DataloaderConfig, {"rows": 4, "batch_size": 8}, "rows=4"),
    (GemmConfig, {"paddings": [3]}, "paddings=[3]"),
    (TrainingTuneConfig, {"recipe": "grpo"}, "rows=data"),
    (SearchConfig, {"space": {"a": [[1]]}}, "space.a"),
    (SearchConfig, {"space": {"a": [1, 1]}}, "space.a"),
    (SearchConfig, {"space": {"a": 1}}, "space.a"),
    (RcclConfig, {"space": {"PATH": ["a", "b"]}}, "space.PATH"),
    (VllmConfig, {"space": {"seed": [1, 2]}}, "set seed= instead"),
    (EngineConfig, {**LENGTHS, "base": {"port": 8000}}, "base: port"),
    (EngineConfig, {**LENGTHS, "settings": [{"instances": 0}]}, "settings: instances=0"),
    (EngineConfig, {**LENGTHS, "settings": [{"instances": "2"}]}, "settings: instances=2"),
    (EngineConfig, {**LENGTHS, "settings": [{"instances": 2}]}, "settings: instances=2"),
    (EngineConfig, {**LENGTHS, "base": HALF, "settings": [{"instances": 3}]}, "instances=3"),
    (EngineConfig, {**LENGTHS, "settings": [{"label": "a"}, {"label": "a", "b": 1}]}, "one label"),
])  # fmt: skip
def test_an_argument_out_of_bounds_is_named(cls, given, words):
    with pytest.raises(UserError) as rejected:
        cls(output_dir="out", **given)
    assert str(rejected.value).startswith("method.args.")
    assert words in str(rejected.value)


def test_removed_arguments_of_vllm_are_named_with_their_replacement():
    for name, instead in vllm_arguments.REMOVED.items():
        with pytest.raises(UserError) as rejected:
            EngineConfig("out", **LENGTHS, settings=[{name: 1}])
        assert f"method.args.settings: {name} " in str(rejected.value)
        assert instead in str(rejected.value)
