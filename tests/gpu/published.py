"""Compare published memory and speed with the planner's: docs/results/memory.md and speed.md.

    python tests/gpu/published.py           updates the pages and PLAN_ERRORS; needs no GPU

published.yaml has the published figures. The MI350X report's transformers have two matrices in
their MLP, and keep all logits in memory. The planner's models have three matrices. So their MLP has
two thirds of the width, which gives the same number of operations, and the memory of the logits is
added (one bf16, two fp32 and one 16-bit gradient tensor).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.config.compose import compose
from launch.estimate.batch_counts import batch
from launch.estimate.speed import step_parts
from launch.machine.products import products
from launch.plan.planning import prepare
from launch.plan.predictions import PLAN_ERRORS, family
from launch.schema.enums import Vendor
from tests.gpu.predictions import MEASURED, planned, planned_row
from tests.gpu.speed_report import write

CONTENT: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
TRANSFORMERS: dict[str, list[int]] = CONTENT["transformers"]
MEMORY_REASONS: dict[str, str] = CONTENT["memory_reasons"]
SPEED_REASONS: dict[str, str] = CONTENT["speed_reasons"]
VOCABULARY = 50257  # with this size, the numbers of parameters equal those of the report


def stand_in(name: str, gpus: int) -> list[str]:
    """Return overrides for a model like one of the report's, with bf16 weights and moments."""
    layers, heads, width, mlp, batch, length, _ = TRANSFORMERS[name]
    parameters = layers * (4 * width**2 + 2 * width * mlp) + VOCABULARY * width
    return f"""
        hardware=mi350x model=llama3_1_8b model.tied_embeddings=true
        model.num_layers={layers} model.num_heads={heads} model.num_kv_heads={heads}
        model.head_dim={width // heads} model.hidden_size={width}
        model.intermediate_size={2 * mlp // 3} model.vocab_size={VOCABULARY}
        model.num_parameters={parameters} method.args.gradient_checkpointing=false
        method.args.per_device_train_batch_size={batch} method.args.max_length={length}
        topology.num_gpus={gpus} topology={"ddp" if gpus > 1 else "single"}
        method=sft precision=bf16 precision.weights=bf16 method.args.gradient_accumulation_steps=1
    """.split()


@dataclass(frozen=True)
class Published:
    """A published figure, as `stated`, and known `reasons` for a difference to the prediction."""

    name: str
    stated: str
    overrides: list[str]
    reasons: tuple[str, ...] = ()

    @property
    def number(self) -> float:
        return float(self.stated.split()[0].replace(",", ""))


@dataclass(frozen=True)
class PublishedMemory(Published):
    """Memory per GPU in GB, compared with the plan's allocation by torch.

    `logits`: GB to add to the plan.
    """

    logits: float = 0.0

    @property
    def predicted_gb(self) -> float:
        return planned(self.overrides, trls_step=True)[0].allocated_gb + self.logits

    @property
    def error(self) -> str:
        low, _, high = self.stated.partition(" to ")
        if not high:
            return f"{self.predicted_gb / float(low) - 1:+.0%}"
        if self.predicted_gb < float(low):
            return "below"
        return "above" if self.predicted_gb > float(high) else "within"


@dataclass(frozen=True)
class PublishedSpeed(Published):
    """Seconds per step: `tokens` divided by the stated rate, or as stated."""

    tokens: int = 0

    @property
    def step_s(self) -> float:
        return self.tokens / self.number if self.tokens else self.number

    @property
    def predicted_s(self) -> float:
        # MLPerf's programs do not use TRL, so their rows have the step that a plan predicts.
        step_s = planned(self.overrides, trls_step="mlperf" not in self.reasons)[1].step_s
        assert step_s
        return step_s - (trainer_seconds(self.overrides) if "loop" in self.reasons else 0.0)

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1


def trainer_seconds(overrides: list[str]) -> float:
    """Return the seconds per step that a trainer takes in addition to a plain loop."""
    config, _ = prepare(compose(overrides))
    peak = config.hardware.peak_tflops[config.precision.compute] * 1e12
    parts = step_parts(config, batch(config), peak)
    return parts["between steps"] + parts["waiting for the host"]


def memory_rows(section: str) -> list[PublishedMemory]:
    rows = []
    for row in CONTENT[section]:
        reasons, logits = tuple(row.get("reasons", ())), 0.0
        if name := row.get("transformer"):
            *_, batch, length, gpus = TRANSFORMERS[name]
            logits = batch * length * VOCABULARY * (2 + 4 + 4 + 2) / 1e9
            row |= {"run": f"GPT {name}, {gpus} MI350X, {batch} x {length}"}
            overrides = stand_in(name, gpus)
        else:
            overrides = row["overrides"].split()
        rows.append(PublishedMemory(row["run"], row["stated"], overrides, reasons, logits))
    return rows


def speed_rows(section: str) -> list[PublishedSpeed]:
    rows = []
    for row in CONTENT[section]:
        tokens = row.get("tokens", 0)
        if name := row.get("transformer"):
            gpus, (*_, batch, length, _) = row["gpus"], TRANSFORMERS[name]
            size = name.partition(",")[0]
            row |= {"run": f"GPT {size}, {gpus} MI350X, {batch} x {length}"}
            overrides, tokens = stand_in(name, gpus), gpus * batch * length
        else:
            overrides = row["overrides"].split()
        reasons = tuple(row["reasons"])
        rows.append(PublishedSpeed(row["run"], row["stated"], overrides, reasons, tokens))
    return rows


MEMORY = {"AMD, unlinked reports": memory_rows("memory_measured")}
SPEED = {
    "AMD, unlinked reports": speed_rows("speed_amd"),
    "TRL on an H200, unlinked report": speed_rows("speed_h200"),
}


def memory_report() -> str:
    def cells(row: PublishedMemory) -> list[str]:
        return [row.name, row.stated, f"{row.predicted_gb:.1f}", row.error]

    return tables(MEMORY, ["run", "GB reported", "predicted", "error"], cells, MEMORY_REASONS)


def speed_report() -> str:
    def cells(row: PublishedSpeed) -> list[str]:
        times = [f"{row.step_s:.4g}", f"{row.predicted_s:.3g}", f"{row.error:+.0%}"]
        return [row.name, *times]

    def summary(rows: list[PublishedSpeed]) -> list[str]:
        errors = [row.error for row in rows]
        mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
        return [f"{len(rows)} rows; worst {worst:+.0%}, mean {mean:.0%}.", ""]

    columns = ["run", "s per step", "predicted", "error"]
    return tables(SPEED, columns, cells, SPEED_REASONS, summary)


def tables(
    sections: dict[str, list[Any]],
    columns: list[str],
    cells: Callable[[Any], list[str]],
    reasons: dict[str, str],
    summary: Callable[[list[Any]], list[str]] = lambda rows: [],
) -> str:
    """Return a table for each section, followed by the explanations of the reasons."""
    lines = []
    for title, rows in sections.items():
        lines += [f"### {title}", "", *summary(rows)]
        lines += [f"| {' | '.join(columns)} | reasons |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {' | '.join(cells(row))} | {', '.join(row.reasons)} |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *(f"- *{word}*: {text}." for word, text in reasons.items())]) + "\n"


def plan_errors(gpus: Container[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return measured step times in predicted ones, of unlinked reports and of our runs.

    They are sorted by product and method. `amd` and `nvidia` have all GPUs of the vendor, for those
    without a measurement, with the number of runs on each and the families of the GPUs. An only
    measurement has the model and precision of its `run`.
    """
    times: list[tuple[str, str, str, Callable[[], float]]] = []
    product_of = {product.group: product.name for product in products()}
    gfx_of = {product.name: product.gfx for product in products()}
    for rows in SPEED.values():
        for row in rows:
            config = compose(row.overrides)
            times.append(
                (
                    config.hardware.product,
                    config.method.name,
                    row.name,
                    lambda row=row: row.error,
                )
            )
    for line in MEASURED.read_text().splitlines():
        ours = json.loads(line)
        values = dict(override.partition("=")[::2] for override in ours["overrides"])
        if "step_s" in ours:
            times.append(
                (
                    product_of[values["hardware"]],
                    values["method"],
                    ours["name"],
                    lambda row=ours: (planned_row(row)[1].step_s or math.nan) / row["step_s"] - 1,
                )
            )
    factors: dict[str, dict[str, list[float]]] = {}
    runs: dict[tuple[str, str], str] = {}
    counts: dict[tuple[str, str], Counter[str]] = {}
    for gpu, method, name, error in times:
        if gpus is None or gpu in gpus:
            time = 1 / (1 + error())
            factors.setdefault(gpu, {}).setdefault(method, []).append(time)
            runs[gpu, method] = ", ".join(name.split(", ")[:2])
            if gpus is None:
                vendor = vendor_of(gfx_of[gpu]).value
                factors.setdefault(vendor, {}).setdefault(method, []).append(time)
                counts.setdefault((vendor, method), Counter())[gpu] += 1
    return {
        gpu: {
            method: {
                "rows": len(times),
                "least": round(min(times), 2),
                "median": round(statistics.median(times), 2),
                "most": round(max(times), 2),
                **({"run": runs[gpu, method]} if len(times) == 1 else {}),
                **places(counts.get((gpu, method)), gfx_of),
            }
            for method, times in sorted(by_method.items())
        }
        for gpu, by_method in sorted(factors.items())
    }


def places(runs: Counter[str] | None, gfx_of: dict[str, str]) -> dict[str, Any]:
    """Return a vendor's GPUs with their numbers of runs, and their families; else {}."""
    families = sorted({family(gfx_of[gpu]) for gpu in runs or ()})
    return {"gpus": dict(runs.most_common()), "families": families} if runs else {}


def vendor_of(gfx: str) -> Vendor:
    return Vendor.amd if gfx.startswith("gfx") else Vendor.nvidia


if __name__ == "__main__":
    PLAN_ERRORS.write_text(json.dumps(plan_errors(), indent=1) + "\n")
    write("memory", "published", memory_report())
    write("speed", "published", speed_report())
