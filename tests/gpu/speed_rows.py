"""List the rows that tests/gpu/speed.py measures, with the speed that our side must reach."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

SFT_4B = "method=sft model=qwen3_4b precision=bf16 method.args.max_length=4096"
PACKED_4B = f"{SFT_4B} method.args.packing=true method.args.packing_strategy=wrapped"
PACKED_8B = PACKED_4B.replace("qwen3_4b", "qwen3_8b")
# The settings of the plain loop on each GPU: 16-bit weights, no checkpointing.
TWO_ROWS = (
    "precision.weights=bf16 method.args.gradient_checkpointing=false "
    "method.args.per_device_train_batch_size=2"
)
BARE_4B = f"{PACKED_4B} {TWO_ROWS} method.args.max_grad_norm=0"
FP8_4B = f"{PACKED_4B} {TWO_ROWS} precision=fp8 method.args.max_grad_norm=0"
LORA_8B = (
    "method=sft model=qwen3_8b adapter=lora precision=bf16 method.args.max_length=4096 "
    f"method.args.packing=true method.args.packing_strategy=wrapped {TWO_ROWS}"
)
SFT_06B = "method=sft model=qwen3_0_6b precision=bf16 method.args.max_length=2048 effective_batch=8"
ONE_GPU, TWO_GPUS = "topology=single", "topology.num_gpus=2"
LOOP_4B = "loop --model qwen3_4b --rows 2 --length 4096"
TRL_4B = "trl --model qwen3_4b --length 4096"
TRL_8B = "trl --model qwen3_8b --length 4096 --rows 2 --lora 16 --weights bf16"
UNSLOTH_8B = TRL_8B.replace("trl", "unsloth", 1)
TRL_06B = "trl --model qwen3_0_6b --length 2048 --rows 8"
GRPO = (
    "method=grpo ~method.rewards.reasoning_gym +method.rewards={tests.gpu.jobs.distinct:1.0}"
    " method.reward_confined=false precision=bf16"
    " method.args.max_completion_length=512 effective_batch=96"
)
TRL_GRPO = "trl --method grpo --rows 96 --micro-batch 8 --length 512"
LONGEST = 2048  # maximum tokens of a completion with a forced length
FRESH = "FRESH_CACHE"  # a placeholder for overrides that set empty caches of compiled kernels


@dataclass(frozen=True)
class Mark:
    """Require that the tokens/s of `ours` are at least `least` * `times` those of `side`.

    In a row with `first_step`, seconds are compared, and ours may take `least` seconds more. Of a
    row's marks with `mode`, only the fastest must reach it.
    """

    side: str
    name: str
    least: float
    times: int = 1
    ours: str = "ours"
    mode: bool = False


@dataclass(frozen=True)
class Row:
    """Sides that run one after another on the same GPUs, by name.

    Sides named ours* are overrides of launch/run.py. The others are arguments of
    tests/gpu/peers.py. `data` is a file of speed.write_data. A side fails if its steps are not
    timed after `seconds`.
    """

    work: str
    sides: dict[str, str]
    marks: list[Mark]
    data: str = "sft"
    gpus: int = 1
    first_step: bool = False
    seconds: float = 150.0
    saved: str | None = None  # a model whose random weights are saved for servers to load
    timed: int = 15  # steps after the warm-up
    forced: bool = False  # the lengths of completions are those of forced_lengths


def two_gpus(work: str, words: str, kinds: list[str], rows: int | None = None) -> Row:
    """Return a row that compares topologies on two GPUs with one GPU.

    `rows`: rows per GPU and step; None: set by `words`.
    """
    one, two = (f" effective_batch={rows * gpus}" if rows else "" for gpus in (1, 2))
    sides = {
        "ours_one": f"{words} {ONE_GPU}{one}",
        **{f"ours_{kind}": f"{words} topology={kind} {TWO_GPUS}{two}" for kind in kinds},
    }
    marks = [
        Mark("ours_one", f"twice our one GPU ({kind})", 0.95, times=2, ours=f"ours_{kind}")
        for kind in kinds
    ]
    return Row(f"SFT 4B on two GPUs, {work}", sides, marks, gpus=2)


def four_gpus(work: str, words: str, kinds: list[str], rows: int) -> Row:
    """Return a row that compares one, two and four GPUs, with `rows` per GPU and step."""
    sides = {"ours_one": f"{words} {ONE_GPU} effective_batch={rows}"}
    for kind, gpus in itertools.product(kinds, (2, 4)):
        sides[f"ours_{kind}_{gpus}"] = (
            f"{words} topology={kind} topology.num_gpus={gpus} effective_batch={rows * gpus}"
        )
    marks = [
        Mark("ours_one", f"four times our one GPU ({kind})", 0.95, times=4, ours=f"ours_{kind}_4")
        for kind in kinds
    ]
    return Row(f"SFT 4B on four GPUs, {work}", sides, marks, gpus=4, timed=8)


def grpo_four(size: str, model: str, least: float) -> Row:
    """Return a row with one GPU that generates and three that train, or two and two."""
    split = (
        f"{GRPO} model={model} topology=split topology.num_gpus=4 topology.server_max_length=768"
    )
    modes = {  # side: (name, overrides)
        "ours": ("synchronous", "topology.overlap=false"),
        "ours_overlap": ("overlap", "topology.overlap=true"),
        "ours_stream": ("stream", "topology.overlap=stream"),
        "ours_two_and_two": ("stream, ours 2 + 2", "topology.overlap=stream topology.servers=2"),
    }
    trl = "TRL's server mode, micro-batch 8, 1 + 3"
    return Row(
        f"GRPO {size}, four GPUs, 96 x (200 + 512) tokens",
        {
            **{side: f"{split} {mode}" for side, (_, mode) in modes.items()},
            "trl": f"{TRL_GRPO} --model {model}",
        },
        [
            Mark("trl", f"{trl} ({name})", least, ours=side, mode=True)
            for side, (name, _) in modes.items()
        ],
        data="prompts",
        gpus=4,
        seconds=400,
        saved=model,
        timed=6,
    )


def grpo(
    size: str, model: str, sync: float | None, fastest: float, timed: int = 16, forced: bool = False
) -> Row:
    """Return a row with one GPU that trains and one that generates.

    `sync` and `fastest` are the ratios to TRL's rate that ours must reach, without and with
    overlap. With `forced`, every completion has the length of forced_lengths.
    """
    split = f"{GRPO} model={model} topology=split topology.num_gpus=2"
    peer = f"{TRL_GRPO} --model {model}"
    if forced:
        split = split.replace("length=512", f"length={LONGEST}")
        peer = peer.replace("length 512", f"length {LONGEST}")
    split += f" topology.server_max_length={LONGEST + 256 if forced else 768}"
    modes = {"ours": "false", "ours_overlap": "true", "ours_stream": "stream"}
    marks = [Mark("trl", "TRL's server mode, micro-batch 8 (synchronous)", sync)] if sync else []
    return Row(
        f"GRPO {size}, 1 + 1, 96 x (200 + {f'1 to {LONGEST:,}' if forced else 512}) tokens",
        {**{side: f"{split} topology.overlap={mode}" for side, mode in modes.items()}, "trl": peer},
        [
            *marks,
            *(
                Mark(
                    "trl",
                    f"TRL's server mode, micro-batch 8 ({side[5:]})",
                    fastest,
                    ours=side,
                    mode=True,
                )
                for side in modes
                if side != "ours"
            ),
        ],
        data="prompts",
        gpus=2,
        seconds=540,
        saved=model,
        timed=timed,
        forced=forced,
    )


TRL = Mark("trl", "TRL's defaults", 1.45)
ROWS: dict[str, Row] = {
    "sft_4b": Row(
        "SFT 4B, 4 x 4,096 tokens, plain command",
        {"ours": f"{PACKED_4B} {ONE_GPU} effective_batch=4", "trl": f"{TRL_4B} --rows 4"},
        [TRL],
    ),
    "best_bf16": Row(
        "SFT 4B, 2 x 4,096 tokens, best bf16",
        {
            "ours": f"{BARE_4B} {ONE_GPU}",
            "loop": LOOP_4B,
            "ours_clipped": f"{BARE_4B} {ONE_GPU} method.args.max_grad_norm=1.0",
        },
        [
            Mark("loop", "plain loop, layers compiled", 0.98),
            Mark("loop", "the same; ours also clips gradients", 0.98, ours="ours_clipped"),
        ],
    ),
    "fp8": Row(
        "SFT 4B, 2 x 4,096 tokens, fp8",
        {
            "ours": f"{FP8_4B} {ONE_GPU}",
            "loop_tensorwise": f"{LOOP_4B} --fp8 tensorwise",
            "loop_rowwise": f"{LOOP_4B} --fp8 rowwise",
            "loop_bf16": LOOP_4B,
        },
        [
            Mark("loop_tensorwise", "plain loop in fp8, tensorwise", 0.97),
            Mark("loop_rowwise", "plain loop in fp8, rowwise", 0.97),
            Mark("loop_bf16", "plain loop in bf16", 1.15),
        ],
    ),
    "lengths": Row(
        "SFT 4B, 8 rows of chat-like lengths",
        {"ours": f"{SFT_4B} {ONE_GPU} effective_batch=8", "trl": f"{TRL_4B} --rows 8"},
        [Mark("trl", "TRL's defaults, padded (ours: packed)", 2.5)],
        data="lengths",
    ),
    "lora_8b": Row(
        "SFT 8B LoRA, 2 x 4,096 tokens, bf16 base",
        {
            "ours": f"{LORA_8B} {ONE_GPU}",
            "trl_liger": f"{TRL_8B} --liger --no-checkpointing",
            "trl": TRL_8B,
        },
        [
            Mark("trl_liger", "TRL + Liger, eager, no checkpointing either", 1.24),
            Mark("trl", "TRL's defaults", 2.2),
        ],
    ),
    # With saved weights, because unsloth loads only from a directory.
    "unsloth": Row(
        "SFT 8B LoRA, 2 x 4,096 tokens, bf16 base",
        {"ours": f"{LORA_8B} {ONE_GPU}", "unsloth": f"{UNSLOTH_8B} --no-checkpointing"},
        [Mark("unsloth", "unsloth, no checkpointing either", 1.0)],
        seconds=240,
        saved="qwen3_8b",
    ),
    "dpo": Row(
        "DPO 1.7B, 4 pairs of 1,024 tokens",
        {
            "ours": (
                "method=dpo model=qwen3_1_7b precision=bf16 method.args.max_length=1024 "
                f"effective_batch=4 {ONE_GPU}"
            ),
            "trl": "trl --method dpo --model qwen3_1_7b --length 1024 --rows 4",
        },
        [Mark("trl", "TRL's defaults", 1.95)],
        data="dpo",
    ),
    "sft_06b": Row(
        "SFT 0.6B, 8 x 2,048 tokens",
        {
            "ours": f"{SFT_06B} {ONE_GPU}",
            "trl": TRL_06B,
            "ours_checkpointing": f"{SFT_06B} {ONE_GPU} method.args.gradient_checkpointing=true",
            "trl_liger": f"{TRL_06B} --liger",
        },
        [
            Mark(
                "trl_liger",
                "TRL + Liger, eager, both checkpointing",
                1.15,
                ours="ours_checkpointing",
            ),
            Mark("trl", "TRL's defaults", 2.7),
        ],
    ),
    "two_gpus": two_gpus("plain command, 8 x 4,096 tokens each", PACKED_4B, ["fsdp"], rows=8),
    "two_gpus_bf16": two_gpus("best bf16, 8 x 4,096 tokens each", BARE_4B, ["ddp", "fsdp"], rows=8),
    "four_gpus": four_gpus(
        "plain command, 8 x 4,096 tokens each", PACKED_4B, ["ddp", "fsdp"], rows=8
    ),
    "four_gpus_bf16": four_gpus(
        "best bf16, 8 x 4,096 tokens each", BARE_4B, ["ddp", "fsdp"], rows=8
    ),
    "four_gpus_8b": Row(
        "SFT 8B on four GPUs, plain command, 8 x 4,096 tokens each",
        {
            f"ours_{kind}_{gpus}": (
                f"{PACKED_8B} topology={kind} topology.num_gpus={gpus} effective_batch={8 * gpus}"
            )
            for kind, gpus in [("fsdp", 2), ("fsdp", 4), ("zero3", 4)]
        },
        [
            Mark("ours_fsdp_2", "twice our two GPUs (fsdp)", 0.95, times=2, ours="ours_fsdp_4"),
            Mark("ours_fsdp_2", "twice our two GPUs (zero3)", 0.0, times=2, ours="ours_zero3_4"),
        ],
        gpus=4,
        timed=8,
    ),
    "grpo_4b_four": grpo_four("4B", "qwen3_4b", 2.5),
    "grpo_06b_four": grpo_four("0.6B", "qwen3_0_6b", 2.5),
    "grpo_1_7b": grpo("1.7B", "qwen3_1_7b", sync=1.5, fastest=3.0),
    "grpo_4b": grpo("4B", "qwen3_4b", sync=1.5, fastest=2.5, timed=6),
    "grpo_forced": grpo("1.7B", "qwen3_1_7b", sync=None, fastest=4.0, timed=6, forced=True),
    "colocate": Row(
        "GRPO 1.7B, one GPU, 96 x (200 + 512) tokens",
        {
            "ours": (
                f"{GRPO} model=qwen3_1_7b topology=colocate topology.num_gpus=1 "
                "method.args.vllm_max_model_length=768"
            ),
            "trl": f"{TRL_GRPO} --model qwen3_1_7b",
        },
        [Mark("trl", "TRL's colocate, micro-batch 8, checkpointing", 1.3)],
        data="prompts",
        seconds=450,
        saved="qwen3_1_7b",
        timed=10,
    ),
    # Last, so that libraries are already cached in memory for both sides.
    "first_step": Row(
        "from command to first step, 4B",
        {
            "ours": f"{PACKED_4B} {ONE_GPU} effective_batch=4 step.compile=true {FRESH}",
            "ours_eager": f"{PACKED_4B} {ONE_GPU} effective_batch=4 speed=off step.compile=false",
        },
        [Mark("ours_eager", "ours, eager", 15)],
        first_step=True,
    ),
}


def chat_lengths(count: int, longest: int = 4096) -> list[int]:
    """Draw numbers of tokens like those of chats: log-normal, median 250, sigma 1.0."""
    drawn = random.Random(0)
    return [
        max(2, min(longest, round(drawn.lognormvariate(math.log(250), 1.0)))) for _ in range(count)
    ]


def forced_lengths(count: int = 9600) -> list[int]:
    """Draw numbers of tokens for completions: log-normal, mean 250, sigma 1.0."""
    drawn = random.Random(0)
    median = 250 / math.exp(0.5)
    return [
        max(1, min(LONGEST, round(drawn.lognormvariate(math.log(median), 1.0))))
        for _ in range(count)
    ]
