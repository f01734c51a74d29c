"""Test that packed, grouped and padded rows have the losses and gradients of TRL's trainer."""

import gc

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from recipes.data.data_load import texts
from recipes.data.data_prepare import load_once
from recipes.measure.metrics import Metrics
from recipes.models.model_build import build_model, build_tokenizer
from recipes.training.train_loop import build_arguments, train
from tests.helpers.trainers import ROWS, assert_same, built, configured, rows_of, trained


def batch_of(size, accumulation=1):
    return [
        f"method.args.per_device_train_batch_size={size}",
        f"method.args.gradient_accumulation_steps={accumulation}",
    ]


@pytest.fixture(scope="module")
def trls(tmp_path_factory):
    """Return three steps of TRL's trainer, with eight padded rows per step."""
    folder = tmp_path_factory.mktemp("trl")
    config = configured(folder, "sft", *rows_of(folder), *batch_of(8), "method.args.max_steps=3")
    loaded = load_once(config, "sft")
    model, tokenizer = build_model(config), build_tokenizer(config, texts(loaded.rows))
    trainer = SFTTrainer(
        model,
        args=build_arguments(SFTConfig, config),
        train_dataset=loaded.rows,
        processing_class=tokenizer,
    )
    return trained(trainer)


@pytest.mark.parametrize("batch", [(8, 1), (2, 4)])
@pytest.mark.parametrize("rows", ["packed", "grouped", "padded"])
def test_steps_equal_trls(tmp_path, trls, rows, batch):
    overrides = [*rows_of(tmp_path), *batch_of(*batch), "method.args.max_steps=3"]
    _, trainer = built(tmp_path, "sft", *overrides, f"step.rows={rows}")
    assert_same(trained(trainer), trls)
    assert len(trls[0]) == 3
    assert trls[0][0]["loss"] - trls[0][-1]["loss"] > 0.1, "the loss decreases"


def test_pack_training_rows_but_not_held_out_rows(tmp_path):
    _, packed = built(tmp_path, "sft", *rows_of(tmp_path), "step.rows=packed")
    (batch, *_) = packed.get_train_dataloader()
    shape = (1, int(batch["document_starts"][-1]))
    assert batch["input_ids"].shape == batch["position_ids"].shape == shape
    (held_out, *_) = packed.get_eval_dataloader(packed.train_dataset)
    assert len(held_out["input_ids"]) == packed.args.per_device_eval_batch_size
    assert "document_starts" not in held_out


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_train_with_grouped_products(tmp_path, architecture):
    experts = ["model.num_experts=4", "model.experts_per_token=2", "method.args.max_steps=1"]
    _, trainer = built(tmp_path, "sft", f"model.architecture={architecture}", *experts)
    with torch.profiler.profile() as profile:
        trained(trainer)
    products = sum(event.name == "aten::_grouped_mm" for event in profile.events())
    # Each of the two layers has two forward, and two backward for each of them.
    assert products == 2 * (2 + 2 * 2)


def test_documents_of_trls_packing(tmp_path):
    """Compare batches of one and of four rows packed by TRL (method.args.packing)."""
    packing = "method.args.packing=true method.args.max_length=64 method.args.max_steps=1".split()
    actual = []
    for batch in ((1, 4), (4, 1)):
        overrides = [*rows_of(tmp_path), *packing, *batch_of(*batch)]
        _, trainer = built(tmp_path / str(batch[0]), "sft", *overrides)
        actual.append(trained(trainer))
    assert_same(*actual)


def test_evaluation_equals_trls(tmp_path):
    _, trainer = built(tmp_path, "sft", *rows_of(tmp_path), "step.rows=packed")
    # Use one batch, because TRL averages entropy and accuracy over batches instead of tokens.
    rows = Dataset.from_list(ROWS[:8])
    actual = trainer.evaluate(rows)
    expected = SFTTrainer(
        build_model(trainer._config),
        args=trainer.args,
        train_dataset=rows,
        processing_class=trainer.processing_class,
    ).evaluate(rows)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(
    "overrides", ["method.args.loss_type=dft", "method.args.label_smoothing_factor=0.1"]
)
def test_use_trls_step_for_other_losses(tmp_path, overrides):
    _, trainer = built(tmp_path, "sft", *rows_of(tmp_path), overrides)
    assert "labels" in trainer.data_collator([trainer.train_dataset[0]])
    assert len(trained(trainer)[0]) == 2


def test_garbage_collection_skips_the_model_after_the_first_step(tmp_path):
    config, trainer = built(tmp_path, "sft", *rows_of(tmp_path), "method.args.max_steps=1")
    train(config, trainer, Metrics(config))
    try:
        assert all(value is not trainer.model for value in gc.get_objects())
    finally:
        gc.unfreeze()


def test_order_pairs_only_within_steps(tmp_path):
    steps, size = {}, 8
    for rows in ("padded", "grouped"):
        _, trainer = built(tmp_path / rows, "dpo", f"step.rows={rows}", *batch_of(2, size // 2))
        drawn = [row for batch in trainer.get_train_dataloader().batch_sampler for row in batch]
        steps[rows] = [drawn[n : n + size] for n in range(0, len(drawn), size)]
    assert list(map(sorted, steps["grouped"])) == list(map(sorted, steps["padded"]))
    assert steps["grouped"] != steps["padded"]


def test_step_without_targets(tmp_path):
    _, trainer = built(tmp_path, "sft", *rows_of(tmp_path))
    batch = trainer.data_collator([{"input_ids": [5, 6], "labels": [-100, -100]}])
    number = trainer._get_num_items_in_batch([batch], trainer.args.device)
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=number)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
    assert not any(gradient.count_nonzero() for gradient in gradients)
