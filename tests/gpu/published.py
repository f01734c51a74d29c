"""Compare published memory and speed with the planner's: docs/results/memory.md and speed.md.

    python tests/gpu/published.py

The MI350X report's transformers have two matrices in their MLP and hold all logits. The planner's
have three, so they stand in with two thirds of the width (as many products), and what the logits of
a batch take (bf16, twice fp32, a 16-bit gradient) is added.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.config.compose import compose
from launch.estimate.batch_counts import batch
from launch.estimate.speed import step_parts
from launch.plan.planning import prepare
from tests.gpu.predictions import planned

VOCABULARY = 50257  # with it the report's numbers of parameters come out
# name: layers, heads, width, MLP, batch, sequence, GPUs, GB published
TRANSFORMERS = {
    "30M": (6, 6, 384, 1536, 32, 512, 1, 9.7),
    "124M": (12, 12, 768, 3072, 16, 512, 1, 9.8),
    "354M": (24, 16, 1024, 4096, 8, 512, 1, 11.3),
    "773M": (36, 20, 1280, 5120, 4, 512, 1, 12.6),
    "1.44B": (48, 24, 1536, 6144, 4, 512, 1, 20.7),
    "2.65B": (32, 32, 2560, 10240, 2, 512, 1, 26.9),
    "5.24B": (32, 32, 4096, 11008, 8, 1024, 1, 107.9),
    "10.1B": (40, 40, 5120, 13824, 4, 1024, 1, 119.7),
    "5.24B, DDP": (32, 32, 4096, 11008, 8, 1024, 8, 92.0),
    "10.1B, DDP": (40, 40, 5120, 13824, 8, 1024, 8, 157.0),
}
ONE_PASS = "method.args.gradient_accumulation_steps=1"
SFT = f"method=sft precision=bf16 precision.weights=bf16 {ONE_PASS}"


def stand_in(name: str, gpus: int) -> list[str]:
    """Return overrides for one of the report's transformers, weights and moments in bf16."""
    layers, heads, width, mlp, batch, length, *_ = TRANSFORMERS[name]
    parameters = layers * (4 * width**2 + 2 * width * mlp) + VOCABULARY * width
    words = f"""
        hardware=mi350x model=llama3_1_8b model.tied_embeddings=true
        model.num_layers={layers} model.num_heads={heads} model.num_kv_heads={heads}
        model.head_dim={width // heads} model.hidden_size={width}
        model.intermediate_size={2 * mlp // 3} model.vocab_size={VOCABULARY}
        model.num_parameters={parameters} method.args.gradient_checkpointing=false
        method.args.per_device_train_batch_size={batch} method.args.max_length={length}
        topology.num_gpus={gpus} topology={"ddp" if gpus > 1 else "single"}
    """
    return f"{words} {SFT}".split()


# ---- Memory


@dataclass(frozen=True)
class PublishedMemory:
    """Hold GB of a GPU as `stated`, to compare with what torch allocates by the plan.

    `reasons` of a difference, as far as known. `logits`: GB that a loop holds and the plan does not
    count. `parts`: those of the plan that were counted, or all.
    """

    name: str
    stated: str
    overrides: list[str]
    reasons: tuple[str, ...] = ()
    logits: float = 0.0
    parts: tuple[str, ...] = ()

    @property
    def predicted_gb(self) -> float:
        found = planned(self.overrides, trls_step=True)[0]
        if self.parts:
            return sum(found.parts_gb.get(part, 0.0) for part in self.parts)
        return found.allocated_gb + self.logits

    @property
    def error(self) -> str:
        least, _, most = self.stated.partition(" to ")
        if not most:
            return f"{self.predicted_gb / float(least) - 1:+.0%}"
        if self.predicted_gb < float(least):
            return "below"
        return "above" if self.predicted_gb > float(most) else "within"


def transformer_memory(name: str, *reasons: str) -> PublishedMemory:
    *_, batch, length, gpus, gb = TRANSFORMERS[name]
    logits = batch * length * VOCABULARY * (2 + 4 + 4 + 2) / 1e9
    run = f"transformer of {name}, {gpus} MI350X, {batch} x {length}"
    return PublishedMemory(run, f"{gb:.1f}", stand_in(name, gpus), reasons, logits)


MEMORY_MEASURED = [
    transformer_memory("30M", "logits"),
    transformer_memory("124M"),
    *(
        transformer_memory(name, "scores")
        for name in ("354M", "773M", "1.44B", "2.65B", "5.24B", "10.1B")
    ),
    transformer_memory("5.24B, DDP"),
    transformer_memory("10.1B, DDP"),
    *(
        PublishedMemory(
            f"Qwen3-8B, {kind}, 8 MI350X, 14 x 8192",
            stated,
            [f"experiment=mi350x_qwen3_8b_{kind}"],
            ("torchtune", *reasons),
        )
        for kind, stated, *reasons in (
            ("full", "76.35"),
            ("lora", "72.65", "adapter"),
            ("fp8", "76.35", "fp8"),
        )
    ),
    PublishedMemory("Qwen3-0.6B, fp32, MI50, 2 x 512", "8 to 12", ["experiment=mi50_baseline"]),
]
MEMORY_EXPECTED = [
    PublishedMemory(
        "the MI50 guide's phase 1, fp32, 4 x 400", "15", ["experiment=mi50_phase1"], ("guess",)
    ),
    PublishedMemory(
        "phase 2, fp16, 6 x 400",
        "18",
        f"experiment=mi50_phase2 method.args.per_device_train_batch_size=6 {ONE_PASS}".split(),
        ("guess",),
    ),
    PublishedMemory(
        "phase 3, fp16, 8 x 400, without checkpointing",
        "25",
        ["experiment=mi50_phase3"],
        ("guess",),
    ),
    PublishedMemory(
        "Qwen3-4B on one MI300X, without activations",
        "32",
        ["experiment=mi300x_sft_qwen3_4b", "precision.weights=bf16"],
        ("state",),
        parts=("weights", "optimizer", "gradients"),
    ),
    PublishedMemory(
        "SFT on Strix Halo, 2 rows", "20 to 30", ["experiment=strix_halo_sft"], ("rows", "driver")
    ),
]
MEMORY_REASONS = {
    "logits": (
        "16,384 x 50,257 logits are 9.9 GB of the prediction, counted as four tensors of 2, 4, 4 "
        "and 2 bytes; the loop seems to hold fewer: with 8 bytes for each the prediction is 9.0"
    ),
    "scores": (
        "presumably attention that is not fused and keeps its scores: the published figure lies "
        "between the prediction and that with hardware.attention=eager (14.6, 15.2, 24.6, 24.7, "
        "132.3 and 137.9 GB), but for 2.65B. By the same report 5.24B takes 16 GB less under DDP, "
        "with the same batch on each GPU and gradients in buckets besides: its two programs do "
        "not compute alike"
    ),
    "torchtune": (
        "torchtune's model and head, with torch.compile and checkpointing; what a compiled layer "
        "keeps is counted, and was measured on an H100 with TRL's"
    ),
    "adapter": (
        "what a compiled layer keeps beside an adapter was read off one run of an H100; the "
        "report states no rank"
    ),
    "fp8": (
        "what fp8 computes again was read off one run of an H100; the report has the same figure "
        "for fp8 and for bf16"
    ),
    "guess": "what its author expected; nothing was measured",
    "state": (
        "the guide's own sum of weights, gradients and Adam's moments in 2 bytes each, as is this "
        "prediction. With activations, and weights in fp32 as TRL has them, the plan says 73 GB"
    ),
    "rows": (
        "model, rows and length are not named: Qwen2.5-7B with LoRA and 1,024 tokens are assumed"
    ),
    "driver": (
        "what the driver has handed out (GTT), with the context and what the allocator keeps: "
        "about 2 GB more than torch allocates"
    ),
}


def memory_report() -> str:
    """Return the tables, and what the words in their last column mean."""
    lines = []
    for title, rows in (
        ("Measured by others", MEMORY_MEASURED),
        ("Expected by others", MEMORY_EXPECTED),
    ):
        lines += [
            f"### {title}",
            "",
            "| published run | GB published | predicted | | known of the reason |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row.name} | {row.stated} | {row.predicted_gb:.1f} | {row.error} | "
            f"{', '.join(row.reasons)} |"
            for row in rows
        ]
        lines.append("")
    meanings = [f"- *{word}*: {meaning}." for word, meaning in MEMORY_REASONS.items()]
    return "\n".join([*lines, *meanings]) + "\n"


# ---- Speed

REASONS = {
    "loop": (
        "a bare loop of torch: what TRL's trainer takes between steps, and what its host takes to "
        "start a Qwen3's kernels, of which a GPT has a fraction, are left out of the prediction; "
        "all logits are held"
    ),
    "small": (
        "presumably small matrix products, for which the same share of the peak is predicted as "
        "for large ones, and kernels that take longer to start than the 6 us that an H200 takes: "
        "by the report's own count the GPU computes 172 to 229 TFLOPS there, 578 at 5.24B"
    ),
    "overlap": (
        "predicted is that sums of gradients hide behind the backward, and cost it nothing. The "
        "report contradicts itself here: eight GPUs make 101,124 tokens/s in one of its tables "
        "and 70,763 in the next"
    ),
    "compile": "torch.compile of the whole model; predicted is each layer compiled by itself",
    "torchtune": (
        "torchtune, whose head makes its logits once; its matrix products (F.linear) reach up to "
        "1,206 TFLOPS by that report, where 1,035 are predicted"
    ),
    "fp8": "the share of fp8's peak is an H100's, 0.61, read off one run",
    "MI50": (
        "the owner saw a quarter of the GPU used, loads data without workers, and has torch 2.4 "
        "of ROCm 6.0; the shares are an H200's"
    ),
    "hope": "what its author expected, not measured",
    "rows": (
        "model, rows and length are not named: Qwen2.5-7B with LoRA and 1,024 tokens in every row "
        "are assumed"
    ),
    "liger": (
        "Liger's fused kernels, whose traffic is a share of the eager one's, read off runs of an "
        "H100"
    ),
    "noted": "nothing more about the run was noted",
}


@dataclass(frozen=True)
class Published:
    """Hold seconds of a step, from the figure as `stated`, and known `reasons` of a difference."""

    name: str
    stated: str
    step_s: float
    overrides: list[str]
    reasons: tuple[str, ...]

    @property
    def predicted_s(self) -> float:
        found = planned(self.overrides, trls_step=True)[1].step_s
        assert found
        return found - (of_a_trainer(self.overrides) if "loop" in self.reasons else 0.0)

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1


def _transformer(name: str, gpus: int, tokens_per_second: int, *reasons: str) -> Published:
    _, _, _, _, batch, length, *_ = TRANSFORMERS[name]
    on = f"{gpus} MI350X, {batch} x {length}"
    step_s = gpus * batch * length / tokens_per_second
    run = f"transformer of {name.partition(',')[0]}, {on}"
    stated = f"{tokens_per_second:,} tokens/s"
    return Published(run, stated, step_s, stand_in(name, gpus), reasons)


def _qwen3_8b(kind: str, tokens_per_second: int, *reasons: str) -> Published:
    """Return a run on eight MI350X, by the rate of one GPU."""
    run, stated = f"Qwen3-8B, {kind}, 8 MI350X, 14 x 8192", f"{tokens_per_second:,} tokens/s/GPU"
    overrides = [f"experiment=mi350x_qwen3_8b_{kind}"]
    return Published(run, stated, 14 * 8192 / tokens_per_second, overrides, reasons)


def seconds(run: str, step_s: float, experiment: str, *reasons: str) -> Published:
    return Published(run, f"{step_s} s a step", step_s, [f"experiment={experiment}"], reasons)


def of_a_trainer(overrides: list[str]) -> float:
    """Compute the seconds of a step that a bare loop lacks: between steps, waiting for the host."""
    config, _ = prepare(compose(overrides))
    peak = config.hardware.peak_tflops[config.precision.compute] * 1e12
    parts = step_parts(config, batch(config), peak)
    return parts["between steps"] + parts["waiting for the host"]


AMD = [
    _transformer("30M", 1, 950_586, "loop", "small"),
    _transformer("124M", 1, 298_957, "loop", "small"),
    _transformer("354M", 1, 107_626, "loop", "small"),
    _transformer("773M", 1, 40_054, "loop", "small"),
    _transformer("1.44B", 1, 24_195, "loop", "small"),
    _transformer("2.65B", 1, 11_980, "loop", "small"),
    _transformer("5.24B", 1, 18_381, "loop"),
    _transformer("10.1B", 1, 7_941, "loop"),
    _transformer("5.24B", 2, 28_451, "loop", "overlap"),
    _transformer("5.24B", 4, 62_813, "loop", "overlap"),
    _transformer("5.24B", 8, 70_763, "loop", "overlap"),
    _transformer("5.24B, DDP", 8, 101_124, "loop", "overlap"),
    _transformer("10.1B, DDP", 8, 50_595, "loop", "overlap"),
    _qwen3_8b("full", 14_471, "compile", "torchtune"),
    _qwen3_8b("lora", 16_312, "compile", "torchtune"),
    _qwen3_8b("fp8", 20_497, "compile", "torchtune", "fp8"),
    seconds("Qwen3-0.6B, fp32, MI50, 4 x 2 x 512", 6.0, "mi50_baseline", "MI50"),
]
HOPES = [
    seconds("the MI50 guide's phase 1", 4.0, "mi50_phase1", "MI50", "hope"),
    seconds("phase 2, fp16", 2.5, "mi50_phase2", "MI50", "hope"),
    seconds("phase 3, without checkpointing", 2.0, "mi50_phase3", "MI50", "hope"),
    # 10,000 rows, 32 a step, three times.
    Published(
        "SFT on Strix Halo, 16 x 2 rows",
        "8 hours",
        8 * 3600 / (30_000 / 32),
        ["experiment=strix_halo_sft"],
        ("rows", "hope"),
    ),
]
ON_H200 = "hardware=h200 model=qwen3_4b precision=bf16"
SFT_4096 = f"{ON_H200} topology=single method=sft method.args.max_length=4096 {ONE_PASS}"
FOUR, EIGHT = (f"method.args.per_device_train_batch_size={n}" for n in (4, 8))
LIGER = "method.args.gradient_checkpointing=false method.args.use_liger_kernel=true"
GRPO = f"{ON_H200} method=grpo topology=split topology.num_gpus=4 effective_batch=96 {EIGHT}"


def _h200(run: str, rows: int, tokens_per_second: int, words: str, *reasons: str) -> Published:
    stated, step_s = f"{tokens_per_second:,} tokens/s", rows * 4096 / tokens_per_second
    run = f"{run}, {rows} x 4096"
    return Published(run, stated, step_s, f"{SFT_4096} {words}".split(), (*reasons, "noted"))


H200 = [
    _h200("SFT of Qwen3-4B, TRL's defaults", 4, 10_012, FOUR),
    _h200("SFT, 16-bit weights", 8, 11_065, f"{EIGHT} precision.weights=bf16"),
    _h200(
        "SFT, 16-bit weights, no checkpointing, Liger",
        4,
        18_457,
        f"{FOUR} precision.weights=bf16 {LIGER}",
        "liger",
    ),
    Published(
        "GRPO, 1 server and 3 trainers, 96 x 512", "6.38 s a step", 6.38, GRPO.split(), ("noted",)
    ),
]


def speed_report() -> str:
    """Return the tables, and what the words in their last column mean."""
    lines = []
    for title, rows in (
        ("AMD, measured by others", AMD),
        ("AMD, expected by others", HOPES),
        ("TRL on an H200, measured by others", H200),
    ):
        errors = [row.error for row in rows]
        mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
        lines += [f"### {title}", "", f"{len(rows)} rows; worst {worst:+.0%}, mean {mean:.0%}.", ""]
        lines += [
            "| run | stated | s a step | predicted | error | known of the reason |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            known = ", ".join(row.reasons)
            lines.append(
                f"| {row.name} | {row.stated} | {row.step_s:.4g} | {row.predicted_s:.3g} | "
                f"{row.error:+.0%} | {known} |"
            )
        lines.append("")
    meanings = [f"- *{word}*: {meaning}." for word, meaning in REASONS.items()]
    return "\n".join([*lines, *meanings]) + "\n"


if __name__ == "__main__":
    print(memory_report())
    print(speed_report())
