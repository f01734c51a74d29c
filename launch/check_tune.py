"""Rows of check.py's table about tunings."""

from __future__ import annotations

from launch.rule import Rule
from launch.schema_enums import Vendor
from launch.trainer_args import argument

TUNE_RULES = [
    Rule(
        "tune_rows",
        lambda c: argument(c, "rows") == "full" and c.method.kind == "tune" and c.data.name != "reasoning",
        lambda c: (
            f"data={c.data.name} with method={c.method.name}: it measures rows that it makes, full to max_length, and would ignore them"
        ),
        lambda c: "no data=; or method.args.rows=data, whose steps are of the lengths that the data has",
    ),
    Rule(
        "tune_for_rocm",
        lambda c: c.method.name in ("tune/tunableop", "tune/miopen") and c.hardware.vendor == Vendor.nvidia,
        lambda c: f"method={c.method.name} on {c.hardware.name}: it chooses between kernels of ROCm's libraries",
        lambda c: "an AMD GPU; method=tune/inductor and tune/batch are for this one too",
    ),
    Rule(
        "tune_inductor",
        lambda c: c.method.name == "tune/inductor" and not c.hardware.compile,
        lambda c: f"method=tune/inductor on {c.hardware.name}: Inductor miscompiles or refuses {c.hardware.gfx}",
        lambda c: "method=tune/tunableop or tune/batch",
    ),
]
