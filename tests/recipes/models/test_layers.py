"""Test that compiled layers equal eager layers, and the fallback to eager layers."""

import functools
import random

import pytest
import torch
from functorch.compile import nop
from omegaconf import OmegaConf
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend

from launch.core.errors import UserError
from recipes.models import layers
from tests.helpers.small_models import small_model
from tests.helpers.trainers import assert_same, built, trained

CHOSEN = {"key": "step.compile", "value": True, "reason": "pays", "before": None}
EVERY_LAYER = ["method.args.gradient_checkpointing=true"]
LORA = ["adapter=lora", "adapter.rank=4", "adapter.dropout=0.0"]
ONE_LAYER = "model.num_layers=1"


@pytest.fixture(autouse=True)
def dynamo():
    """Reset compiled code and its settings after each test."""
    settings = {"optimize_ddp": True, "specialize_float": False, "recompile_limit": 8}
    # With one thread, inductor starts no processes.
    with torch._dynamo.config.patch(settings), torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.fixture
def use(monkeypatch):
    """Return `use(backend)`, which replaces inductor, since that needs a C++ compiler."""
    compile_each = layers.compile_each
    return lambda backend: monkeypatch.setattr(
        layers, "compile_each", functools.partial(compile_each, backend=backend)
    )


def compiled(run_dir, method, *overrides, measured=True, requested=True):
    """Return the trainer of `built`, with batches padded for compiling, before compile_layers."""
    # Four rows of the maximum length are the rehearsal batch.
    lengths = [] if method == "grpo" else ["method.args.max_length=128"]
    measured = f"hardware.kernels_measured={str(measured).lower()}"
    config, trainer = built(run_dir, method, "step.compile=true", measured, *lengths, *overrides)
    if not requested:
        OmegaConf.update(config, "chosen", [CHOSEN])
    return config, trainer


def is_compiled(trainer):
    return trainer.compiled == "yes" and all(
        "forward" in vars(layer) for layer in layers.decoder_layers(trainer.model)
    )


LLAMA = ["model.architecture=llama", "step.rows=packed", *EVERY_LAYER]
QWEN2 = ["model.architecture=qwen2", "model.attention_bias=true", "step.rows=grouped"]


@pytest.mark.parametrize(("method", "overrides", "backend"), [
    ("sft", LLAMA, "aot_eager"),
    ("sft", [*QWEN2, *LORA, *EVERY_LAYER, "step.checkpointed_layers=1"], "eager"),
    ("dpo", [], "eager"),
])  # fmt: skip
def test_losses_and_gradients_equal_eager_layers(tmp_path, use, method, overrides, backend):
    """Compare SFT and DPO; tests/recipes/training/test_grpo_step.py compares GRPO."""
    use(backend)
    actual = []
    for name in ("eager", "compiled"):
        config, trainer = compiled(tmp_path / name, method, *overrides)
        config.step.compile = name == "compiled"
        trainer.compile_layers(config)
        actual.append(trained(trainer))
        assert is_compiled(trainer) == config.step.compile
    assert_same(*actual)


def test_varying_lengths_need_few_graphs():
    multiple = layers.MULTIPLE
    model, failures = small_model(num_hidden_layers=2), []
    graphs, draw = CompileCounterWithBackend("eager"), random.Random(0)
    layers.compile_each(model.model.layers, failures.append, backend=graphs)
    for _ in range(12):
        rows, tokens = draw.randint(1, 4), multiple * -(-draw.randint(1, 500) // multiple)
        model(torch.zeros(rows, tokens, dtype=torch.long), use_cache=False)
    # One or several rows of one or several blocks of tokens.
    assert graphs.frame_count <= 4
    assert failures == []


def with_item(module, args, output):
    """Print, which a graph cannot contain."""
    print(output.sum().item())


@pytest.mark.parametrize("measured", [True, False])
def test_uncompilable_layers_stay_eager_if_compile_was_chosen(tmp_path, use, capsys, measured):
    use("eager")
    _, eager = built(tmp_path / "eager", "sft")
    config, trainer = compiled(tmp_path / "compiled", "sft", measured=measured, requested=False)
    layers.decoder_layers(trainer.model)[0].mlp.register_forward_hook(with_item)
    trainer.compile_layers(config)
    assert_same(trained(trainer), trained(eager))
    assert not is_compiled(trainer)
    assert trainer.compiled not in ("yes", None)
    assert f"layers are not compiled: {trainer.compiled}" in capsys.readouterr().out


def test_uncompilable_layers_end_the_run_if_compile_was_requested(tmp_path, use):
    use("eager")
    config, trainer = compiled(tmp_path, "sft")
    layers.decoder_layers(trainer.model)[0].mlp.register_forward_hook(with_item)
    trainer.compile_layers(config)
    with pytest.raises(UserError, match="step.compile=false"):
        trainer.train()


def one_more(graph, inputs):
    """Return a compiled function with a wrong result."""
    return lambda *args: tuple(
        part + 1 if torch.is_floating_point(part) else part for part in graph(*args)
    )


@pytest.mark.parametrize(
    ("method", "overrides", "backend", "agrees"),
    [("sft", ["step.rows=packed", ONE_LAYER], "eager", True), ("grpo", [], one_more, False)],
)
def test_unmeasured_hardware_compares_the_first_micro_batch(
    tmp_path, use, method, overrides, backend, agrees
):
    """The comparison must not change losses, gradients, metrics or random numbers."""
    use(backend)
    lora = [*overrides, *LORA[:2], "adapter.dropout=0.1"]
    # Compute this before building the other trainer, which resets the seed.
    expected = trained(compiled(tmp_path / "eager", method, *lora)[1])
    config, trainer = compiled(
        tmp_path / "compiled", method, *lora, measured=False, requested=False
    )
    trainer.compile_layers(config)
    assert_same(trained(trainer), expected)
    assert is_compiled(trainer) == agrees


def no_kernel(graph, inputs):
    raise InternalTorchDynamoError("no kernel")


def test_failed_kernels_leave_dropout_and_metrics_unchanged(tmp_path, use):
    # The kernel of the backward pass is compiled last.
    use(aot_autograd(fw_compiler=nop, bw_compiler=no_kernel))
    lora = [*LORA[:2], "adapter.dropout=0.25", ONE_LAYER]
    expected = trained(compiled(tmp_path / "eager", "sft", *lora)[1])
    config, trainer = compiled(tmp_path / "compiled", "sft", *lora, measured=False, requested=False)
    trainer.compile_layers(config)
    assert_same(trained(trainer), expected)
    assert "no kernel" in trainer.compiled
