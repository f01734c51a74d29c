"""What each precision and each adapter costs in loss: the same small model, from the same weights, on the same rows.

    python tests/gpu/precision_loss.py --hardware mi300x        on a GPU: some minutes
    python tests/gpu/precision_loss.py --hardware cpu --tiny    on a CPU: fp8 is emulated

A start is trained in fp32 first, so that adapters have something to adapt. Every row goes on from it through the sft recipe as the launcher
configures it, once a seed (the order of the rows, an adapter's first weights). Prints a Markdown table: the mean of the loss over the last
quarter of the steps, for each seed, and how far it is from that of fp32 with the same seed. Adapters train at ten times the learning rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from accelerate.state import AcceleratorState
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.compose import compose
from launch.plan import plain, prepare
from launch.trainer_args import complete
from recipes.common import program
from recipes.sft import sft

ROWS = {
    "fp32": ["precision=fp32"],
    "bf16 products, fp32 weights": ["precision=bf16"],
    "bf16 products and weights": ["precision=bf16", "precision.weights=bf16"],
    "fp16 products, fp32 weights": ["precision=fp16"],
    "fp8 products, fp32 weights": ["precision=fp8"],
    "LoRA, fp32": ["precision=fp32", "adapter=lora"],
    "rsLoRA, fp32": ["precision=fp32", "adapter=lora", "adapter.rslora=true"],
    "DoRA, fp32": ["precision=fp32", "adapter=dora"],
    "LoRA, bf16 base": ["precision=bf16", "precision.weights=bf16", "adapter=lora"],
    "LoRA, nf4 base (QLoRA)": ["precision=nf4", "adapter=qlora"],
}
SEEDS = (0, 1)


def train(run_dir: Path, settings: argparse.Namespace, *overrides: str) -> tuple[float, float | None] | str:
    """Loss of the last quarter and the merge's error, or why it did not run."""
    run_dir.mkdir(parents=True)
    hardware = [f"hardware={settings.hardware}", "hardware.precisions=[fp32,bf16,fp16,fp8,nf4]"]
    size = ["model.num_layers=2"] if settings.tiny else ["model.hidden_size=512", "model.intermediate_size=1536", "model.num_layers=8"]
    config, _ = prepare(compose([*hardware, "topology=single", "method=sft", "model=tiny", "tracking=none", *size, *overrides]))
    content = {**plain(config), "run_dir": str(run_dir), "trainer_args": complete(config, run_dir, (8000, 8001))}
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
    AcceleratorState._reset_state(reset_partial_state=True)  # the precision of the run before
    if program.run(sft, ["--config", str(run_dir / "config.yaml")]) != 0:
        return str(json.loads((run_dir / "result.json").read_text())["error"])
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run_dir / "result.json").read_text())
    return statistics.mean(losses[-max(1, len(losses) // 4) :]), result.get("merge_error")


def steps(count: int, rate: float, seed: int, settings: argparse.Namespace) -> list[str]:
    args = {"max_steps": count, "logging_steps": 1, "learning_rate": rate, "save_strategy": "no"}
    args["per_device_train_batch_size"] = 16 if settings.tiny else 64
    return [f"seed={seed}", *(f"method.args.{key}={value}" for key, value in args.items())]


def table(settings: argparse.Namespace, work: Path) -> list[str]:
    started = train(work / "start", settings, *steps(settings.start_steps, settings.learning_rate, 7, settings))
    if isinstance(started, str):
        raise SystemExit(f"the start did not train: {started}")
    lines = [f"Start: loss {started[0]:.4f} after {settings.start_steps} steps.", ""]
    lines += ["| | " + " | ".join(f"loss, seed {s}" for s in SEEDS) + " | less fp32's, mean | its spread | merge error |"]
    lines += ["|---|" + "---|" * (len(SEEDS) + 3)]
    reference: list[float] = []
    for name, overrides in ROWS.items():
        rate = settings.learning_rate / 2 * (10 if any("adapter=" in o for o in overrides) else 1)
        found = []
        for seed in SEEDS:
            run_dir = work / name.replace(" ", "_").replace(",", "") / str(seed)
            own = [f"model.path={work / 'start/model'}", "model.init=pretrained", *steps(settings.steps, rate, seed, settings)]
            outcome = train(run_dir, settings, *own, *overrides)
            shutil.rmtree(run_dir)
            found.append(outcome)
            if isinstance(outcome, str):
                break
        if isinstance(found[-1], str):
            lines.append(f"| {name} | not run: {found[-1].splitlines()[-1][:120]} |" + " |" * (len(SEEDS) + 2))
        else:
            losses = [outcome[0] for outcome in found]
            reference = reference or losses
            apart = [loss - other for loss, other in zip(losses, reference, strict=True)]
            merge = found[0][1]
            cells = [*(f"{loss:.4f}" for loss in losses), f"{statistics.mean(apart):+.4f}", f"{max(apart) - min(apart):.4f}"]
            lines.append(f"| {name} | {' | '.join(cells)} | {'' if merge is None else f'{merge:.1%}'} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        print("\n".join(table(settings, Path(work))))


if __name__ == "__main__":
    main()
