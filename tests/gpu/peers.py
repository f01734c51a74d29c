r"""Train as a user would without this project, in one process with one setting.

    python tests/gpu/peers.py trl --model qwen3_4b --rows 4 --length 4096 \
        --data rows.jsonl --metrics out.jsonl
    python tests/gpu/peers.py trl --liger --no-checkpointing --weights bf16 --lora 16 \
        --model qwen3_8b ...
    python tests/gpu/peers.py trl --method grpo --server-gpu 1 --saved model --model qwen3_1_7b \
        --rows 96 --micro-batch 8 --length 512 ...
    python tests/gpu/peers.py unsloth --saved model --model qwen3_8b --rows 2 --length 4096 \
        --lora 16 --weights bf16 ...
    python tests/gpu/peers.py save --saved model --model qwen3_1_7b --data rows.jsonl
                            the weights that a server starts with
    python tests/gpu/peers.py loop --fp8 tensorwise --model qwen3_4b --rows 2 --length 4096 \
        --metrics out.jsonl

The sides are TRL's trainers, unsloth, and a plain loop with compiled layers. Weights are random.
Every step appends a line to --metrics with the keys of our own metrics.jsonl: step, time_s,
num_tokens, loss, memory_peak_gb. A batch that does not fit is halved, and its steps accumulate
twice as many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["unsloth"]:
    import unsloth  # before transformers and TRL, which it patches
import torch
from omegaconf import OmegaConf
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.models.model_build import model_config, train_tokenizer
from tests.gpu.jobs import MASK, distinct

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS_ROWS = 8192  # tokens whose logits a plain loop holds at once
RANDOM_TOKENS = 1000  # ids that a plain loop draws from
# Of TRL's server and of the group that gives it weights. Its GPU is added, for two on one host.
PORT, GROUP_PORT = 8123, 51216
PROMPT_TOKENS = 256  # left for a prompt
COLOCATED_SHARE = 0.3  # TRL's default
BEGAN = time.perf_counter()


def record(given: argparse.Namespace, step: int, tokens: int, loss: float) -> None:
    """Append the line of one step; reading its loss has waited for the GPU."""
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    row = {
        "step": step,
        "time_s": time.perf_counter() - BEGAN,
        "num_tokens": tokens,
        "loss": loss,
        "memory_peak_gb": peak / 1e9,
    }
    row["micro_batch"] = given.micro_batch
    with Path(given.metrics).open("a") as file:
        file.write(json.dumps(row) + "\n")


def random_model(given: argparse.Namespace) -> PreTrainedModel:
    """Draw the weights on the GPU: a CPU needs minutes for 8e9 of them."""
    shape = OmegaConf.merge(
        {"attention_bias": False}, OmegaConf.load(ROOT / f"conf/model/{given.model}.yaml")
    )
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(
            model_config(shape), dtype=DTYPES[given.weights], attn_implementation="sdpa"
        )


class Recorder(TrainerCallback):
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs and "loss" in logs:
            # unsloth counts no tokens.
            every_row_is_cut = state.global_step * self.given.rows * self.given.length
            record(
                self.given,
                state.global_step,
                int(logs.get("num_tokens", every_row_is_cut)),
                logs["loss"],
            )


def trl(given: argparse.Namespace) -> None:
    """Train with TRL's defaults (bf16 autocast, checkpointing, clipping) and the given options."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    rows, tokenizer = rows_and_tokenizer(given)
    model = unsloth_model(given) if given.side == "unsloth" else random_model(given)
    arguments: dict[str, Any] = {
        "output_dir": str(Path(given.metrics).with_suffix("")),
        "max_steps": given.steps,
        "per_device_train_batch_size": given.micro_batch,
        "gradient_accumulation_steps": given.rows // given.micro_batch,
        "max_completion_length" if given.method == "grpo" else "max_length": given.length,
        "gradient_checkpointing": given.checkpointing,
        "use_liger_kernel": given.liger,
        "dataloader_num_workers": 2,  # kinder than TRL's default of none
        "use_cpu": DEVICE.type == "cpu",
        "seed": 0,  # ours, so that both draw the rows in one order
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
    }
    shared: dict[str, Any] = {
        "model": model,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [Recorder(given)],
    }
    if given.lora and given.side != "unsloth":
        shared["peft_config"] = LoraConfig(
            task_type="CAUSAL_LM",
            r=given.lora,
            lora_alpha=2 * given.lora,
            target_modules="all-linear",
        )
    if given.method == "grpo":
        model.name_or_path = given.saved  # where a colocated engine reads it
        with generating(given) as engine:
            GRPOTrainer(
                reward_funcs=distinct,
                args=GRPOConfig(use_vllm=True, **engine, **arguments),
                **shared,
            ).train()
    elif given.method == "dpo":
        reference = random_model(given)
        reference.load_state_dict(model.state_dict())
        DPOTrainer(ref_model=reference, args=DPOConfig(**arguments), **shared).train()
    else:
        SFTTrainer(args=SFTConfig(**arguments), **shared).train()


def unsloth_model(given: argparse.Namespace) -> Any:
    """Load --saved with adapters on every projection, as unsloth's notebooks do.

    Checkpointing is unsloth's, which offloads to the host.
    """
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        given.saved, max_seq_length=given.length, dtype=DTYPES[given.weights], load_in_4bit=False
    )
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    checkpointing = "unsloth" if given.checkpointing else False
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=given.lora,
        lora_alpha=2 * given.lora,
        target_modules=projections,
        use_gradient_checkpointing=checkpointing,
    )


def rows_and_tokenizer(
    given: argparse.Namespace,
) -> tuple[list[dict[str, str]], PreTrainedTokenizerFast]:
    rows = [json.loads(line) for line in Path(given.data).read_text().splitlines()]
    return rows, train_tokenizer((text for row in rows for text in row.values()), vocab_size=512)


def save(given: argparse.Namespace) -> None:
    """Write a model of random weights in 16 bits, with its tokenizer, to --saved."""
    given.weights = "bf16"
    random_model(given).save_pretrained(given.saved)
    rows_and_tokenizer(given)[1].save_pretrained(given.saved)


@contextlib.contextmanager
def generating(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what TRL generates with.

    That is a vLLM server on another GPU, started as TRL's documentation says, or an engine on this
    GPU.
    """
    longest = given.length + PROMPT_TOKENS
    if given.server_gpu is None:
        yield {
            "vllm_mode": "colocate",
            "vllm_max_model_length": longest,
            "vllm_gpu_memory_utilization": COLOCATED_SHARE,
        }
        return
    port = PORT + given.server_gpu
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        given.saved,
        "--port",
        str(port),
    ]
    argv += [
        "--max-model-len",
        str(longest),
        "--gpu-memory-utilization",
        "0.9",
        "--weight-transfer-config",
        '{"backend": "nccl"}',
    ]
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    server = subprocess.Popen(
        argv, env={**os.environ, MASK: str(given.server_gpu), "VLLM_SERVER_DEV_MODE": "1"}
    )
    try:
        yield {
            "vllm_mode": "server",
            "vllm_server_base_url": f"http://127.0.0.1:{port}",
            "vllm_group_port": GROUP_PORT + given.server_gpu,
        }
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()


def loop(given: argparse.Namespace) -> None:
    """Train with compiled layers and loss and fused AdamW, without clipping or checkpointing.

    Whole logits are never held.
    """
    torch.set_float32_matmul_precision("high")
    model = random_model(given).train()
    body, width = model.model, model.config.hidden_size
    if given.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            body,
            config=Float8LinearConfig.from_recipe_name(given.fp8),
            module_filter_fn=lambda module, name: isinstance(module, torch.nn.Linear),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def head_loss(hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((hidden @ model.lm_head.weight.T).float(), following)

    if given.compile:
        for layer in body.layers:
            layer.compile()
        head_loss = torch.compile(head_loss)
    for step in range(1, given.steps + 1):
        tokens = torch.randint(
            0,
            min(RANDOM_TOKENS, model.config.vocab_size),
            (given.rows, given.length),
            device=DEVICE,
        )
        hidden = body(input_ids=tokens, use_cache=False).last_hidden_state.reshape(-1, width)
        loss = backward_in_chunks(head_loss, hidden, tokens.roll(-1, 1).reshape(-1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        record(given, step, step * tokens.numel(), float(loss))


def backward_in_chunks(
    head_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    following: torch.Tensor,
) -> torch.Tensor:
    """Backpropagate the mean loss, holding the logits of LOSS_ROWS tokens at a time; return it."""
    leaf, count = hidden.detach().requires_grad_(True), len(hidden)
    total = torch.zeros((), device=hidden.device)
    for begin in range(0, count, LOSS_ROWS):
        part = slice(begin, begin + LOSS_ROWS)
        loss = head_loss(leaf[part], following[part]) * (len(following[part]) / count)
        loss.backward()
        total += loss.detach()
    hidden.backward(leaf.grad)
    return total


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=["trl", "unsloth", "loop", "save"])
    parser.add_argument("--model", required=True, help="a name of conf/model")
    parser.add_argument(
        "--rows", type=int, default=1, help="sequences, or pairs, of one optimizer step"
    )
    parser.add_argument("--micro-batch", type=int, help="those of one forward pass; default: all")
    parser.add_argument(
        "--length",
        type=int,
        default=1,
        help="tokens that a row is cut to, or that each completion has",
    )
    parser.add_argument("--metrics", help="where the lines go; all but `save` need it")
    parser.add_argument("--saved", help="what `save` has written: vLLM and unsloth start with it")
    parser.add_argument("--data", help="rows for TRL as JSON lines")
    parser.add_argument("--method", choices=["sft", "dpo", "grpo"], default="sft")
    parser.add_argument(
        "--server-gpu",
        type=int,
        help="of grpo: where vLLM's server runs; default: an engine beside the trainer",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--weights",
        choices=sorted(DTYPES),
        help="default: fp32 as TRL has it; the plain loop: bf16",
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--fp8", choices=["tensorwise", "rowwise"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="conf/model/tiny.yaml and 128 tokens: shows on a CPU that it runs",
    )
    given = parser.parse_args(argv)
    given.micro_batch = given.micro_batch or given.rows
    given.weights = given.weights or ("fp32" if given.side in ("trl", "unsloth") else "bf16")
    if given.tiny:
        given.model, given.length = "tiny", min(given.length, 128)
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    if given.side == "save":
        return save(given)
    Path(given.metrics).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that a server ends too
    try:
        (loop if given.side == "loop" else trl)(given)
    except torch.OutOfMemoryError:
        if given.side == "loop" or given.micro_batch % 2:
            raise
    else:
        return
    half = str(given.micro_batch // 2)
    print(f"out of memory: once more with --micro-batch {half}", flush=True)
    # A new process image holds no part of what did not fit. argparse takes the last --micro-batch.
    os.execv(sys.executable, [sys.executable, *sys.argv, "--micro-batch", half])


if __name__ == "__main__":
    main()
