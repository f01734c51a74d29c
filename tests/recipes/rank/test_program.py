"""Test exit codes, result.json and metrics.jsonl, models, tokenizers, and rejected settings."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, SFTConfig

from launch.core.errors import UserError
from recipes.grpo import cycle_steps
from recipes.measure import metrics
from recipes.measure.flops import flops_per_token
from recipes.models.model_build import (
    CHAT_TEMPLATE,
    END,
    build_model,
    build_tokenizer,
)
from recipes.rank import program
from recipes.rank.device import DTYPES
from recipes.training import train_loop
from tests.conftest import ROOT, composed
from tests.helpers.bench_config import ADAPTER

TINY = Path(__file__).parents[3] / "conf/model/tiny.yaml"


def config(tmp_path, **own):
    none = dict.fromkeys(("hub_id", "revision", "path", "chat_template"))
    return OmegaConf.create(
        {
            "run_dir": str(tmp_path),
            "seed": 0,
            "model": {**none, "attention_bias": False, **OmegaConf.load(TINY), **own},
            "data": {"chat_template": None},
            "precision": {"name": "fp32", "weights": "fp32", "compute": "fp32"},
            "hardware": {"attention": "sdpa", "peak_tflops": {}},
            "adapter": {**ADAPTER, "quantize_base": False},
            "trainer_args": {},
        }
    )


def run(tmp_path, work):
    OmegaConf.save(config(tmp_path), tmp_path / "config.yaml")
    code = program.run(work, ["--config", str(tmp_path / "config.yaml")])
    return code, json.loads((tmp_path / "result.json").read_text())


def raises(error):
    def work(_config):
        raise error

    return work


@pytest.mark.parametrize(("work", "code", "result"), [
    (lambda _: {"loss": 0.5}, 0, {"status": "done", "loss": 0.5}),
    (raises(program.Interrupted(steps=3)), 75, {"status": "interrupted", "steps": 3}),
    (raises(UserError("data.path: no")), 2, {"status": "failed", "error": "data.path: no"}),
    (raises(RuntimeError("first\nlast")), 1,
     {"status": "failed", "error": "RuntimeError: first\nlast"}),
])  # fmt: skip
def test_result_and_exit_code(tmp_path, work, code, result):
    assert run(tmp_path, work) == (code, {**result, "exit_code": code})


def test_packages_of_the_rank_s_python(tmp_path):
    run(tmp_path, lambda _: {})
    assert json.loads((tmp_path / "packages.json").read_text())["torch"] == torch.__version__


def test_only_the_main_rank_writes_a_result(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(FileNotFoundError):
        run(tmp_path, lambda _: {})


def test_a_line_and_its_end_are_one_write_of_an_unbuffered_rank():
    code = "from recipes.rank.program import say; say('a line'); say('another')"
    packets, output = os.pipe2(os.O_DIRECT)  # keeps the boundaries of writes
    subprocess.run([sys.executable, "-u", "-c", code], stdout=output, cwd=ROOT, check=True)
    assert [os.read(packets, 100), os.read(packets, 100)] == [b"a line\n", b"another\n"]


def test_a_signal_requests_a_stop_until_the_run_ends(tmp_path):
    number = signal.SIGTERM

    def work(_config):
        os.kill(os.getpid(), number)
        return {"requested": program.stop_requested()}

    before = signal.getsignal(number)
    assert run(tmp_path, work)[1]["requested"] is True
    assert (program.stop_requested(), signal.getsignal(number)) == (False, before)


def test_random_weights_depend_on_the_seed(tmp_path):
    settings = config(tmp_path, num_layers=1)
    first, again = (build_model(settings).state_dict() for _ in range(2))
    settings.seed = 1
    other = build_model(settings).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16"])
def test_random_weights_are_rounded_to_the_compute_dtype(tmp_path, compute):
    """Start every strategy from the same weights: DeepSpeed makes fp32 of 16-bit ones."""
    settings = config(tmp_path, num_layers=1)
    settings.precision.compute = compute
    weight = build_model(settings).lm_head.weight
    assert weight.dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        rounded = torch.equal(weight, weight.to(dtype).float())
        assert rounded == (dtype == DTYPES[compute])


def test_a_shape_that_transformers_rejects_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"^model: llama of transformers .*126.*\.py:"):
        build_model(config(tmp_path, architecture="llama", hidden_size=126))


def test_training_a_tokenizer_is_reproducible(tmp_path):
    settings = config(tmp_path)
    first, again = (build_tokenizer(settings, ["Calculate 12 + 34.", "46"]) for _ in range(2))
    assert first.get_vocab() == again.get_vocab()
    assert len(first) <= settings.model.vocab_size
    assert first.convert_ids_to_tokens(first("1234")["input_ids"]) == ["1", "2", "3", "4"]
    assert first.decode(first("é → 7")["input_ids"]) == "é → 7"


def test_the_chat_template_marks_answers(tmp_path):
    settings = config(tmp_path)
    tokenizer = build_tokenizer(settings, ["ab"])
    settings.data.chat_template = str(tmp_path / "bom.jinja")
    (tmp_path / "bom.jinja").write_text("\ufeff" + tokenizer.chat_template, encoding="utf-8")
    assert build_tokenizer(settings, ["ab"]).chat_template == tokenizer.chat_template
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    encoded = tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    marked = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(marked) == ["2", END]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_a_saved_model_is_loaded(tmp_path):
    settings = config(tmp_path, num_layers=1)
    built = build_model(settings)
    built.save_pretrained(tmp_path / "m")
    build_tokenizer(settings, ["12"]).save_pretrained(tmp_path / "m")
    settings.model.path = str(tmp_path / "m")
    read, names = build_model(settings), build_tokenizer(settings, [])
    assert torch.equal(read.lm_head.weight, built.lm_head.weight)
    assert names.chat_template == CHAT_TEMPLATE


def test_arguments_that_trl_rejects_are_user_errors(tmp_path):
    settings = config(tmp_path)
    settings.hardware = {"vendor": "amd"}
    settings.topology = {"strategy": "none", "servers": 0}
    settings.trainer_args = {"output_dir": str(tmp_path), "max_seq_length": 8}
    with pytest.raises(UserError, match="max_seq_length"):
        train_loop.build_arguments(SFTConfig, settings)


@pytest.mark.parametrize(
    ("precision", "reduce_dtype"),
    [("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp8", "fp32")],
)
def test_fsdp_reduces_gradients_in_the_configured_dtype(tmp_path, precision, reduce_dtype):
    overrides = f"precision={precision} topology.fsdp.reduce_dtype={reduce_dtype}".split()
    composition = composed(
        *"hardware=mi300x model=qwen3_4b method=sft topology=fsdp".split(), *overrides
    )
    settings = OmegaConf.to_container(OmegaConf.structured(composition), enum_to_str=True)
    # Nothing that this machine would reject for its devices.
    arguments = {"fsdp": True, "fsdp_config": {"version": 2}, "bf16": False}
    settings["trainer_args"] = {"output_dir": str(tmp_path), **arguments}
    args = train_loop.build_arguments(SFTConfig, OmegaConf.create(settings))
    policy = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args).mixed_precision_policy
    dtypes = policy and (policy.param_dtype, policy.reduce_dtype)
    compute = DTYPES.get(precision, torch.bfloat16)
    assert dtypes == (None if precision == "fp32" else (compute, DTYPES[reduce_dtype]))


def test_generation_cycles_and_checkpoints_are_aligned(tmp_path):
    def steps(save_steps, **own):
        args = {"per_device_train_batch_size": 8, "use_cpu": True, "bf16": False, **own}
        return cycle_steps(
            GRPOConfig(str(tmp_path), save_steps=save_steps, report_to="none", **args)
        )

    assert steps(7) == 1
    assert steps(8, steps_per_generation=2, num_iterations=2) == 4
    assert steps(6, gradient_accumulation_steps=2, steps_per_generation=3) == 3
    with pytest.raises(UserError, match="Use method.args.save_steps=8"):
        steps(6, steps_per_generation=4)


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        metrics.append(path, {"step": step})
    whole = path.read_bytes()
    for damage in (b'{"step": 4', b"[1]\n", b'{"loss": 1}\n', b'{"step": "2"}\n', b"\xff\n", b"\n"):
        path.write_bytes(damage + whole if damage.endswith(b"\n") else whole + damage)
        assert [row["step"] for row in metrics.drop_after(path, 3)] == [1, 2, 3], damage
    assert [row["step"] for row in metrics.drop_after(path, 2)] == [1, 2]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert metrics.drop_after(tmp_path / "none.jsonl", 2) == []


def test_flops_include_products_and_attention(tmp_path):
    built: AutoModelForCausalLM = build_model(config(tmp_path))
    products = sum(p.numel() for p in built.parameters()) - 512 * 128
    attention = 6 * 4 * 4 * 32 * 10  # layers, heads, head size, positions
    assert flops_per_token(built, 10.0) == 6 * products + attention
    assert flops_per_token(built, 10.0, reference=True) == 8 * products + attention + attention / 3
    for name, parameter in built.named_parameters():
        parameter.requires_grad = "layers.0" in name
    trained = sum(p.numel() for n, p in built.named_parameters() if "layers.0" in n)
    assert flops_per_token(built, 0.0) == 4 * products + 2 * trained


def test_a_signal_stops_training_at_the_end_of_a_cycle(monkeypatch):
    monkeypatch.setattr(train_loop, "stop_requested", lambda: True)
    stop, args = train_loop.StopOnSignal(cycle=4), SimpleNamespace(device=torch.device("cpu"))
    for step, expected in [(3, False), (4, True)]:
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        stop.on_step_end(args, SimpleNamespace(global_step=step), control)
        assert (control.should_save, control.should_training_stop) == (expected, expected)
