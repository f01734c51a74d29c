r"""Train like a user without this project, in one process and with one setting.

    python tests/gpu/peers.py trl --model qwen3_4b --rows 4 --length 4096 \
        --data rows.jsonl --metrics out.jsonl
    python tests/gpu/peers.py trl --liger --no-checkpointing --weights bf16 --lora 16 \
        --model qwen3_8b ...
    python tests/gpu/peers.py trl --method grpo --server-gpu 1 --saved model --model qwen3_1_7b \
        --rows 96 --micro-batch 8 --length 512 ...
    accelerate launch --use_fsdp --num_processes 3 ... tests/gpu/peers.py trl --method grpo ...
                            several trainers; speed.py has the whole command
    python tests/gpu/peers.py unsloth --saved model --model qwen3_8b --rows 2 --length 4096 \
        --lora 16 --weights bf16 ...
    python tests/gpu/peers.py save --saved model --model qwen3_1_7b --data rows.jsonl
                            saves the weights for a server
    python tests/gpu/peers.py loop --fp8 tensorwise --model qwen3_4b --rows 2 --length 4096 \
        --metrics out.jsonl

The sides are TRL's trainers, unsloth, and a plain loop with compiled layers. Weights are random.
Every step appends a line to --metrics with keys of our metrics.jsonl: step, time_s, num_tokens,
loss, memory_peak_gb. If a batch does not fit in memory, the program starts again with half the
micro-batch and twice the accumulation.
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
LOSS_ROWS = 8192  # tokens whose logits a plain loop has in memory at the same time
RANDOM_TOKENS = 1000  # number of ids from which the plain loop draws tokens
# Ports of TRL's server and of the group that sends its weights. The number of the server's GPU is
# added, so that two servers can run on one host.
PORT, GROUP_PORT = 8123, 51216
# Variables of accelerate and torchrun, with which a server hangs as if it were a rank.
OF_RANKS = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
OF_RANKS += ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
PROMPT_TOKENS = 256  # maximum length of a prompt
COLOCATED_SHARE = 0.3  # TRL's default
BEGAN = time.perf_counter()
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def record(options: argparse.Namespace, step: int, tokens: int, loss: float) -> None:
    """Append the line of one step. The GPU is idle, because the loss has been read."""
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    row = {
        "step": step,
        "time_s": time.perf_counter() - BEGAN,
        "num_tokens": tokens,
        "loss": loss,
        "memory_peak_gb": peak / 1e9,
    }
    row["micro_batch"] = options.micro_batch
    with Path(options.metrics).open("a") as file:
        file.write(json.dumps(row) + "\n")


def random_model(options: argparse.Namespace) -> PreTrainedModel:
    """Return a model with random weights, drawn on the GPU because a CPU takes minutes for 8B."""
    shape = OmegaConf.merge(
        {"attention_bias": False}, OmegaConf.load(ROOT / f"conf/model/{options.model}.yaml")
    )
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(
            model_config(shape), dtype=DTYPES[options.weights], attn_implementation="sdpa"
        )


class Recorder(TrainerCallback):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs and "loss" in logs and RANK == 0:
            # unsloth does not log tokens, but all rows have the full length.
            full_rows = state.global_step * self.options.rows * self.options.length
            record(
                self.options,
                state.global_step,
                int(logs.get("num_tokens", full_rows)),
                logs["loss"],
            )


def trl(options: argparse.Namespace) -> None:
    """Train with TRL's defaults (bf16 autocast, checkpointing, clipping) and the given options."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    rows, tokenizer = rows_and_tokenizer(options)
    model = unsloth_model(options) if options.side == "unsloth" else random_model(options)
    arguments: dict[str, Any] = {
        "output_dir": str(Path(options.metrics).with_suffix("")),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.rows // options.micro_batch // RANKS,
        "max_completion_length" if options.method == "grpo" else "max_length": options.length,
        "gradient_checkpointing": options.checkpointing,
        "use_liger_kernel": options.liger,
        "dataloader_num_workers": 2,  # faster than TRL's default of 0
        "use_cpu": DEVICE.type == "cpu",
        "seed": 0,  # as on our side, so that both have the same order of rows
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
    }
    shared: dict[str, Any] = {
        "model": model,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [Recorder(options)],
    }
    if options.lora and options.side != "unsloth":
        shared["peft_config"] = LoraConfig(
            task_type="CAUSAL_LM",
            r=options.lora,
            lora_alpha=2 * options.lora,
            target_modules="all-linear",
        )
    if options.method == "grpo":
        model.name_or_path = options.saved  # a colocated engine loads the model from here
        with generating(options) as engine:
            GRPOTrainer(
                reward_funcs=distinct,
                args=GRPOConfig(use_vllm=True, **engine, **arguments),
                **shared,
            ).train()
    elif options.method == "dpo":
        reference = random_model(options)
        reference.load_state_dict(model.state_dict())
        DPOTrainer(ref_model=reference, args=DPOConfig(**arguments), **shared).train()
    else:
        SFTTrainer(args=SFTConfig(**arguments), **shared).train()


def unsloth_model(options: argparse.Namespace) -> Any:
    """Load --saved with an adapter on every projection, as in unsloth's notebooks.

    Checkpointing is that of unsloth, which offloads to the host.
    """
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        options.saved,
        max_seq_length=options.length,
        dtype=DTYPES[options.weights],
        load_in_4bit=False,
    )
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    checkpointing = "unsloth" if options.checkpointing else False
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=options.lora,
        lora_alpha=2 * options.lora,
        target_modules=projections,
        use_gradient_checkpointing=checkpointing,
    )


def rows_and_tokenizer(
    options: argparse.Namespace,
) -> tuple[list[dict[str, str]], PreTrainedTokenizerFast]:
    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    return rows, train_tokenizer((text for row in rows for text in row.values()), vocab_size=512)


def save(options: argparse.Namespace) -> None:
    """Write a model with random bf16 weights, and its tokenizer, to --saved."""
    options.weights = "bf16"
    random_model(options).save_pretrained(options.saved)
    rows_and_tokenizer(options)[1].save_pretrained(options.saved)


@contextlib.contextmanager
def generating(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield TRL's arguments for generation.

    With --server-gpu, start a vLLM server as TRL's documentation describes. Otherwise TRL starts an
    engine on this GPU.
    """
    longest = options.length + PROMPT_TOKENS
    if options.server_gpu is None:
        yield {
            "vllm_mode": "colocate",
            "vllm_max_model_length": longest,
            "vllm_gpu_memory_utilization": COLOCATED_SHARE,
        }
        return
    port = PORT + options.server_gpu
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        options.saved,
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
    own = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
    server = None
    if RANK == 0:
        server = subprocess.Popen(
            argv, env={**own, MASK: str(options.server_gpu), "VLLM_SERVER_DEV_MODE": "1"}
        )
    try:
        yield {
            "vllm_mode": "server",
            "vllm_server_base_url": f"http://127.0.0.1:{port}",
            "vllm_group_port": GROUP_PORT + options.server_gpu,
        }
    finally:
        if server:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()


def loop(options: argparse.Namespace) -> None:
    """Train with compiled layers, a compiled loss and fused AdamW, without clipping.

    There is no checkpointing, and only LOSS_ROWS logits are in memory at the same time.
    """
    torch.set_float32_matmul_precision("high")
    model = random_model(options).train()
    body, width = model.model, model.config.hidden_size
    if options.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            body,
            config=Float8LinearConfig.from_recipe_name(options.fp8),
            module_filter_fn=lambda module, name: isinstance(module, torch.nn.Linear),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def head_loss(hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((hidden @ model.lm_head.weight.T).float(), following)

    if options.compile:
        for layer in body.layers:
            layer.compile()
        head_loss = torch.compile(head_loss)
    for step in range(1, options.steps + 1):
        tokens = torch.randint(
            0,
            min(RANDOM_TOKENS, model.config.vocab_size),
            (options.rows, options.length),
            device=DEVICE,
        )
        hidden = body(input_ids=tokens, use_cache=False).last_hidden_state.reshape(-1, width)
        loss = backward_in_chunks(head_loss, hidden, tokens.roll(-1, 1).reshape(-1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        record(options, step, step * tokens.numel(), float(loss))


def backward_in_chunks(
    head_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    following: torch.Tensor,
) -> torch.Tensor:
    """Backpropagate the mean loss in chunks of LOSS_ROWS tokens, and return the loss."""
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
    parser.add_argument("--rows", type=int, default=1, help="sequences or pairs per optimizer step")
    parser.add_argument(
        "--micro-batch", type=int, help="those of one forward pass; default: --rows"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=1,
        help="maximum tokens of a row, or tokens of each completion",
    )
    parser.add_argument("--metrics", help="file for the lines; required except by `save`")
    parser.add_argument("--saved", help="the output of `save`, which vLLM and unsloth load")
    parser.add_argument("--data", help="JSON lines of rows for TRL")
    parser.add_argument("--method", choices=["sft", "dpo", "grpo"], default="sft")
    parser.add_argument(
        "--server-gpu",
        type=int,
        help="GPU of vLLM's server for grpo; default: an engine on the trainer's GPU",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--weights",
        choices=sorted(DTYPES),
        help="default: fp32 as in TRL; for the plain loop, bf16",
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--fp8", choices=["tensorwise", "rowwise"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="use conf/model/tiny.yaml and 128 tokens, for a test on a CPU",
    )
    options = parser.parse_args(argv)
    options.micro_batch = options.micro_batch or options.rows
    options.weights = options.weights or ("fp32" if options.side in ("trl", "unsloth") else "bf16")
    if options.tiny:
        options.model, options.length = "tiny", min(options.length, 128)
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.side == "save":
        return save(options)
    if RANK == 0:
        Path(options.metrics).unlink(missing_ok=True)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # run `finally`, which ends a server
    try:
        (loop if options.side == "loop" else trl)(options)
    except torch.OutOfMemoryError:
        if options.side == "loop" or options.micro_batch % 2 or RANKS > 1:
            raise
    else:
        return
    half = str(options.micro_batch // 2)
    print(f"out of memory: trying again with --micro-batch {half}", flush=True)
    # A new process image frees all GPU memory. argparse uses the last --micro-batch.
    os.execv(sys.executable, [sys.executable, *sys.argv, "--micro-batch", half])


if __name__ == "__main__":
    main()
