"""Checkpoints that are whole or not there.

A checkpoint is written into a staging directory, its manifest (size and sha256 of every file) last, and renamed when all of it has
reached the disk. A resumed run takes the newest one whose files agree with its manifest, and so do those of the best one that it names.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from recipes.common.files import move_directory, sha256, write_json
from recipes.common.program import say

MANIFEST = "manifest.json"
STAGING = ".staging"
HEARTBEAT = "heartbeat"  # in the run directory, beside that of the checkpoints: the launcher's watchdog looks at its time


class AtomicCheckpoints:
    """Mixed into a trainer of transformers, before it, changes how it saves and nothing else."""

    _staging: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = directory / STAGING
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()  # every rank has written its part
        self.state.best_model_checkpoint = None  # a place in the staging directory; best_global_step says which it is
        if self.args.should_save:
            self.state.save_to_json(str(directory / STAGING / name / TRAINER_STATE_NAME))
            seal(directory / STAGING / name, directory / name, directory.with_name(HEARTBEAT))
            clear_staging(directory)
            rotate(directory, self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _dtypes_kept(self.model):
            super()._load_from_checkpoint(*args, **kwargs)

    def load_weights(self, checkpoint: Path) -> None:
        """Give the model those of `checkpoint`, by the strategy's own loader."""
        self.state.best_model_checkpoint = str(checkpoint)
        with _dtypes_kept(self.model):
            self._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle of the arguments that nothing reads: they stand in config.yaml.
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: record.json says what the run was, and a card written beside the checkpoints would not be written atomically."""


@contextlib.contextmanager
def _dtypes_kept(model: nn.Module) -> Iterator[None]:
    """PEFT loads an adapter in fp32, and TRL has made that of a nf4 base bf16."""
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    yield
    for name, weight in model.named_parameters():
        if weight.dtype != dtypes[name]:
            weight.data = weight.data.to(dtypes[name])


def seal(staged: Path, target: Path, heartbeat: Path | None = None) -> None:
    """Give the directory `staged` its manifest and make it `target` in one step. `heartbeat` is touched while it is hashed."""
    files = {str(p.relative_to(staged)): {"bytes": p.stat().st_size, "sha256": sha256(p, heartbeat)} for p in _files(staged)}
    write_json(staged / MANIFEST, {"files": files})
    move_directory(staged, target)


def newest(directory: Path, heartbeat: Path | None = None) -> Path | None:
    """The newest whole checkpoint of `directory`, or None. One that is not whole is named on stdout and passed over.

    `heartbeat` is touched while they are hashed.
    """
    for path in reversed(_checkpoints(directory)):
        fault = find_fault(path, heartbeat) or _fault_of_best(path, heartbeat)
        if fault is None:
            return path
        say(f"checkpoint {path} is refused: {fault}; looking for an older one")
    return None


def find_fault(checkpoint: Path, heartbeat: Path | None = None) -> str | None:
    """What differs from the manifest, or None for a whole checkpoint. `heartbeat` is touched while it is hashed."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes of {expected['bytes']}"
        if sha256(path, heartbeat) != expected["sha256"]:
            return f"the content of {name} has changed"
    return None


def _fault_of_best(checkpoint: Path, heartbeat: Path | None) -> str | None:
    best = best_of(checkpoint)
    fault = None if best in (None, checkpoint) else find_fault(best, heartbeat)
    return fault and f"of the best before it, {best.name}, {fault}"


def best_of(checkpoint: Path) -> Path | None:
    """The best checkpoint by held-out rows when this one was saved; None where none was chosen."""
    file = checkpoint / TRAINER_STATE_NAME
    try:
        step = json.loads(file.read_text()).get("best_global_step") if file.is_file() else None
    except ValueError:  # cut off: `newest` passes over this one and says so
        step = None
    return checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{step}") if step else None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def rotate(directory: Path, limit: int | None) -> None:
    """Remove all but the newest `limit` checkpoints and those that these name as the best: a run may go on from any of them."""
    if limit:
        found = _checkpoints(directory)
        best = {best_of(path) for path in found[-limit:]}
        for path in found[:-limit]:
            if path not in best:
                shutil.rmtree(path)


def clear_staging(directory: Path) -> None:
    """Remove the staging directory, and what a save that was cut off has left in it."""
    shutil.rmtree(directory / STAGING, ignore_errors=True)


def _checkpoints(directory: Path) -> list[Path]:
    found = [p for p in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if p.is_dir() and p.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=step_of)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())
