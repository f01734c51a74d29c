"""Check whether resume=<run directory> can continue a run on different ranks.

resume=auto needs no check, because it only resumes an identical composition.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from launch.config.identity import PROPERTIES, without_removed_keys
from launch.core.errors import UserError
from launch.core.json_files import read_json
from launch.estimate.batch_counts import batch, generation_batch, why_order_depends_on_batch
from launch.machine import placement
from launch.schema import Config, trainer_args

# Keys that place ranks, set their number, or divide a step's sequences among them. The same
# arguments can be overridden in method.smoke.
PLACEMENT_KEYS = re.compile(
    r"runtime\..*|hardware\.gpus_per_node|effective_batch|topology\.(name|num_gpus|strategy|numa_binding)|"
    r"method\.(args|smoke)\.(per_device_train_batch_size|gradient_accumulation_steps|steps_per_generation|generation_batch_size)"
)
# Strategy -> the library that writes and reads its checkpoints.
FORMATS = {"none": "transformers", "ddp": "transformers", "fsdp": "FSDP2"}
FORMATS |= {"zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def recorded_config(composition: dict[str, Any]) -> Config:
    """Return the typed form of a recorded composition, with its original values.

    Records of earlier versions have no properties of the method, so conf/ fills them in.
    """
    name = (composition.get("method") or {}).get("name")
    file = trainer_args.METHODS / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    defaults = {"method": {name: content[name] for name in PROPERTIES if name in content}}
    merged = OmegaConf.merge(
        OmegaConf.structured(Config), defaults, without_removed_keys(composition)
    )
    config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    return config


def check(resume: str, old: Config, new: Config) -> None:
    """Raise UserError if the run `resume`, whose composition is `old`, cannot resume as `new`."""
    for reason, remedy in _refusals(old, new):
        raise UserError(f"resume={resume}: {reason}. Use: {remedy}; resume=never starts afresh.")


def notes(new: Config, run_dir: Path) -> list[str]:
    """Return a note for the plan if resume=<run directory> continues a run on different ranks."""
    if new.resume in ("auto", "never"):
        return []
    old = recorded_config((read_json(run_dir / "record.json") or {})["composition"])
    if _ranks(old) == _ranks(new):
        return []
    ranks = f"resume: {_ranks(old)} before, {_ranks(new)} now"
    if not new.method.trains:
        return [f"{ranks}. Finished batches are reused, and results do not depend on the ranks."]
    sampled = " Completions are sampled again." if new.method.generates else ""
    return [
        f"{ranks}. The order of rows and the sequences per step stay the same.{sampled} Sums round "
        "differently, so results differ in their last digits."
    ]


def progress(run_dir: Path, steps: int | None) -> str:
    """Return where a run of `steps` resumes, for the plan; '' for a new run."""
    if not (run_dir / "record.json").is_file():
        return ""
    folders = run_dir.glob("checkpoints/checkpoint-*[0-9]")
    newest = max((int(folder.name.rpartition("-")[2]) for folder in folders), default=None)
    total = f" of {steps:,}" if steps else ""
    return " (resumes)" if newest is None else f" (resumes after step {newest:,}{total})"


def _ranks(config: Config) -> str:
    return f"topology={config.topology.name} with {placement.num_trainers(config)} rank(s)"


def _refusals(old: Config, new: Config) -> Iterator[tuple[str, str]]:
    """Yield each reason why `old` cannot resume as `new`, and its remedy."""
    if new.method.kind == "evaluator":  # evaluations are saved per batch
        return
    ranks = f"{_ranks(old)} before, {_ranks(new)} now"
    old_ranks = f"topology={old.topology.name} topology.num_gpus={placement.num_gpus(old)}"
    if not new.method.trains or new.phases:
        yield f"{ranks}: only training, evaluation and sampling resume on other ranks", old_ranks
    # topology.servers is not a placement key, so both have the same number of servers.
    if (old.topology.name == "colocate") != (new.topology.name == "colocate"):
        yield f"{ranks}: another engine would generate", old_ranks
    before, after = old.topology.strategy, new.topology.strategy
    if FORMATS[before] != FORMATS[after]:
        key = "topology.strategy" if old.topology.servers else "topology"
        strategy = "single" if (key, before) == ("topology", "none") else before
        reason = f"topology.strategy={after} cannot read checkpoints of {FORMATS[before]}"
        yield reason, f"{key}={strategy}"
    old_batch, new_batch = batch(old), batch(new)
    if before.startswith("zero") and old_batch.ranks != new_batch.ranks:
        yield (
            f"{ranks}: the optimizer's state has a file per rank, and DeepSpeed only loads these "
            "files on the same number of ranks",
            f"{old_ranks}; topology=ddp and topology=fsdp can resume on other ranks",
        )
    if old_batch.sequences != new_batch.sequences:
        yield (
            f"a step had {old_batch.sequences} sequences ({old_batch.ranks} rank(s) x "
            f"{old_batch.per_device} x accumulation {old_batch.accumulation}) and would have "
            f"{new_batch.sequences}, so the run would repeat or skip rows",
            f"effective_batch={old_batch.sequences}",
        )
    if new.method.generates and (completions := generation_batch(old)) != generation_batch(new):
        yield (
            f"a generation had {completions} completions and would have {generation_batch(new)}, "
            "so the run would see other prompts",
            f"method.args.generation_batch_size={completions}, with "
            "'~method.args.steps_per_generation' if you set that",
        )
    sizes = (old_batch.per_device, old_batch.accumulation)
    has_other_sizes = sizes != (new_batch.per_device, new_batch.accumulation)
    if has_other_sizes and (by_batch := why_order_depends_on_batch(new)):
        yield (
            f"{by_batch}, so another batch size or accumulation would change the order of rows",
            f"method.args.per_device_train_batch_size={old_batch.per_device} on "
            f"{old_batch.ranks} rank(s)",
        )
