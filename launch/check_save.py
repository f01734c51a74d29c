"""Rows of check.py's table about the trained model."""

from __future__ import annotations

from launch.rule import Rule

SAVE_RULES = [
    Rule(
        "save_model",
        lambda c: not c.save_model and (bool(c.phases) or c.method.kind != "trainer"),
        lambda c: (
            "save_model=false with " + ("phases, which hand a model on" if c.phases else f"method={c.method.name}, which trains none")
        ),
        lambda c: "leave it out",
    ),
]
