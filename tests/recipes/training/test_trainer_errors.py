"""Test that rejections by constructors of libraries are one message that names key and line."""

import importlib.util

import pytest
from transformers import Trainer, TrainerState
from trl import SFTConfig

from launch.core.errors import UserError
from launch.plan.check_files import MODULES
from launch.rules.optimizers import optimizer
from launch.schema.trainer_args import lock
from recipes.training.trainer_errors import ReportedRejections
from tests.helpers.small_models import small_model
from tests.helpers.trainers import built


@pytest.mark.parametrize(("override", "message"), [
    ("padding_free=true", "method.args: SFTTrainer rejects this: .*sft_trainer.py:"),
    ("debug=nope", "method.args: SFTConfig rejects this: nope is not .*[.]py:"),
    ("chat_template_path=/nowhere", "method.args: SFTTrainer .*'/nowhere'"),
    ('optim_args="momentum=foo"', "method.args.optim=sgd: "),
    ("gradient_checkpointing=true method.args.gradient_checkpointing_kwargs={foo:1}",
     "method.args.gradient_checkpointing_kwargs={'foo': 1}: the first step .* foo .*[.]py:"),
    ("lr_scheduler_type=cosine_with_min_lr", "method.args.lr_scheduler_type=cosine_with_min_lr: "),
])  # fmt: skip
def test_a_rejected_argument_is_one_message(tmp_path, override, message):
    with pytest.raises(UserError, match=message):  # noqa: PT012 (some fail in train)
        arguments = ["method.args.optim=sgd", *f"method.args.{override}".split()]
        _, trainer = built(tmp_path / "run", "sft", *arguments)
        trainer.train()


class Library:
    """Stand for a library's trainer whose step fails."""

    def training_step(self, text):
        raise ValueError(text)


class Failing(ReportedRejections, Library):
    def __init__(self, args, step):
        self.args, self.state = args, TrainerState(global_step=step)


@pytest.mark.parametrize(("text", "step", "error"), [
    ("no such kernel foo", 0, UserError), ("the foo bar is wrong", 0, UserError),
    ("use_cpu is wrong", 0, UserError), ("a bug in food of seed 1", 0, ValueError),
    ("no such kernel foo", 1, ValueError),
])  # fmt: skip
def test_an_error_is_hidden_only_if_the_first_step_names_an_argument(tmp_path, text, step, error):
    args = SFTConfig(
        tmp_path, use_cpu=True, bf16=False, lr_scheduler_kwargs={"foo_bar": 1, "foo": 2}
    )
    with pytest.raises(error, match=text):
        Failing(args, step).training_step(text)


def test_a_padding_free_batch_without_a_maximum_length_trains(tmp_path):
    arguments = ["method.args.padding_free=true", "method.args.max_length=null"]
    trainer = built(tmp_path / "run", "sft", *arguments)[1]
    trainer.train()
    assert trainer.state.global_step == 2


def test_the_packages_of_all_optimizers_are_known(tmp_path):
    """Compare with transformers, which raises an error for an optimizer without its package."""
    names, rejected = lock()["arguments"]["trl.SFTConfig"]["optim"]["names"], set()
    model = small_model()
    for name in names:
        args = SFTConfig(tmp_path, optim=name, use_cpu=True, bf16=False)
        args.optim_target_modules = ["q_proj"]
        try:
            Trainer.get_optimizer_cls_and_kwargs(args, model)
        except (ImportError, ValueError):
            rejected.add(name)
    assert all(map(optimizer, names))
    packages = {name: row["package"] for name in names if "package" in (row := optimizer(name))}
    modules = {name: MODULES.get(p, p.replace("-", "_")) for name, p in packages.items()}
    assert rejected == {n for n, module in modules.items() if not importlib.util.find_spec(module)}
