"""Write the table of docs/hardware/reports.md from the files in docs/results/reports/.

.venv/bin/python docs/hardware_reports.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, FOLDER = DOCS / "hardware" / "reports.md", DOCS / "results" / "reports"
START, END = "<!-- table: written by docs/hardware_reports.py -->", "<!-- end of the table -->"
NO_REPORT = "No report has been sent yet. Yours would be the first."
TITLES = (
    *("GPUs", "software", "largest kernel error of its tolerance", "GEMM TFLOPS"),
    *("SFT tokens/s", "compiled", "peak GB", "GRPO tokens/s", "stages not done", "report"),
)


def table(files: Iterable[Path]) -> str:
    """Return a row per report, or a sentence. Percentages are shares of the prediction."""
    rows = [row(path.name, json.loads(path.read_text())) for path in sorted(files)]
    lines = [TITLES, ["---"] * len(TITLES), *rows] if rows else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) or NO_REPORT


def row(name: str, content: dict[str, Any]) -> list[str]:
    stages = {stage["stage"]: stage for stage in content["stages"]}

    def best(stage: str, figure: str, unwanted: str = "fp8") -> str:
        figures = [
            f
            for f in stages.get(stage, {}).get("figures", [])
            if figure in f["figure"] and unwanted not in f["figure"] and f["measured"] is not None
        ]
        return share(max(figures, key=lambda f: f["measured"])) if figures else ""

    errors = [
        f["measured"] / f["tolerance"]
        for f in stages.get("numerics", {}).get("figures", [])
        if f["measured"] is not None and "tolerance" in f
    ]
    gpus = [gpu["product"] for gpu in content["gpus"]]
    versions = {**content["host"], **content["packages"]}
    names = ("rocm", "nvidia_driver", "torch", "vllm")
    return [
        ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or "CPU",
        ", ".join(f"{key} {versions[key]}" for key in names if versions.get(key)),
        f"{max(errors):.0%}" if errors else "",
        best("gemm", "TFLOPS"),
        best("sft", "tokens/s"),
        best("sft_compiled", "tokens/s"),
        best("sft", "peak memory"),
        best("grpo", "tokens/s"),
        ", ".join(f"{s['stage']}: {s['status']}" for s in stages.values() if s["status"] != "done"),
        f"[{content['created'][:10]}](../results/reports/{name})",
    ]


def share(figure: dict[str, Any]) -> str:
    """Return a measured value, and its share of the prediction."""
    predicted = figure.get("predicted")
    text = (
        f"{figure['measured']:,.4g}" if figure["measured"] < 1e4 else f"{figure['measured']:,.0f}"
    )
    return f"{text} ({figure['measured'] / predicted:.0%})" if predicted else text


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{table(FOLDER.glob('*.json'))}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
