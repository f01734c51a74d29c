"""Check TRL's losses against figures worked out by hand, to notice a release that changes one."""

import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset

from recipes.models.model import train_tokenizer

VOCABULARY = 320
NUMBERS = ["12", "7", "345", "60", "8", "91", "2", "33"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one", "two", "12 + 34 = 46"], vocab_size=VOCABULARY)


def small_model():
    from transformers import AutoConfig

    torch.manual_seed(0)
    shape = AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


def arguments(tmp_path, **own):
    common = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 1,
        "logging_steps": 1,
    }
    return {
        **common,
        "output_dir": str(tmp_path),
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **own,
    }


def first_log(trainer):
    trainer.train()
    return trainer.state.log_history[0]


def sft_log(tmp_path, tokenizer, model, **own):
    rows = Dataset.from_list([{"prompt": "one ", "completion": number} for number in NUMBERS])
    return first_log(
        SFTTrainer(
            model,
            args=SFTConfig(**arguments(tmp_path, **own)),
            train_dataset=rows,
            processing_class=tokenizer,
        )
    )


def test_sft_loss_of_a_zeroed_head_is_ln_v(tmp_path, tokenizer):
    model = small_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert sft_log(tmp_path, tokenizer, model, per_device_train_batch_size=8)[
        "loss"
    ] == pytest.approx(math.log(VOCABULARY), abs=1e-6)


def test_sft_accumulates_to_the_loss_of_the_whole_batch(tmp_path, tokenizer):
    whole = sft_log(
        tmp_path,
        tokenizer,
        small_model(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
    )
    parts = sft_log(
        tmp_path,
        tokenizer,
        small_model(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
    )
    assert abs(whole["loss"] - parts["loss"]) < 1e-6


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 25.0)]
)
def test_dpo_loss_before_any_step(tmp_path, tokenizer, loss_type, expected):
    rows = Dataset.from_list(
        [
            {"prompt": "one ", "chosen": a, "rejected": b}
            for a, b in zip(NUMBERS, reversed(NUMBERS), strict=True)
        ]
    )
    args = DPOConfig(
        **arguments(tmp_path, beta=0.1, loss_type=[loss_type], per_device_train_batch_size=8)
    )
    trainer = DPOTrainer(
        small_model(),
        ref_model=small_model(),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    assert first_log(trainer)["loss"] == pytest.approx(expected, rel=1e-5)


def grpo(tmp_path, tokenizer, lengths, rewards, **own):
    """Return a trainer with given completions and rewards, by TRL's own hook."""

    def rollout(prompts, trainer):
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        completion_ids = [
            [10 + i] * (length - 1) + [tokenizer.eos_token_id] for i, length in enumerate(lengths)
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(prompts, completions, **columns):
        return rewards

    args = GRPOConfig(
        **arguments(
            tmp_path,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            **own,
        )
    )
    rows = Dataset.from_list([{"prompt": "one "}] * 4)
    return GRPOTrainer(
        small_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def test_grpo_advantages(tmp_path, tokenizer):
    trainer = grpo(tmp_path, tokenizer, [6, 6, 6, 6], [1.0, 0.0, 0.0, 0.0])
    assert first_log(trainer)["loss"] == pytest.approx(0.0, abs=1e-6)  # on policy, equal lengths
    assert list(trainer._logs["advantages"]) == pytest.approx(
        [1.499700, -0.499900, -0.499900, -0.499900], abs=1e-6
    )


def test_grpo_learns_nothing_from_a_constant_reward(tmp_path, tokenizer):
    log = first_log(grpo(tmp_path, tokenizer, [2, 6, 6, 6], [1.0] * 4))
    assert (log["grad_norm"], log["loss"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", 0.0), ("dapo", 0.29994), ("dr_grpo", 0.187463)]
)
def test_grpo_loss_of_unequal_lengths(tmp_path, tokenizer, loss_type, expected):
    log = first_log(
        grpo(tmp_path, tokenizer, [2, 6, 6, 6], [1.0, 0.0, 0.0, 0.0], loss_type=loss_type)
    )
    assert log["loss"] == pytest.approx(expected, abs=1e-5)


def test_packing_fills_rows_best_fit_first():
    packed = pack_dataset(
        Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6, 7], [8]]}),
        seq_length=4,
        strategy="bfd",
    )
    assert packed["input_ids"][:] == [[4, 5, 6, 7], [1, 2, 3, 8]]
    assert packed["seq_lengths"][:] == [[4], [3, 1]]
