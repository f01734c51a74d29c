"""Write checkpoints atomically, and find the newest complete one.

A checkpoint is written into a staging directory and renamed when all files are on disk. Its
manifest has the size and sha256 of each file. A resumed run uses the newest checkpoint that matches
its manifest. If it refers to a best checkpoint, that one must match its own manifest too.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from launch.core.errors import os_error_text
from launch.core.json_files import read_json, sha256, write_json
from recipes.rank.files import move_directory, remove, staging
from recipes.rank.program import say

MANIFEST = "manifest.json"
STAGING = ".staging"
# A file in the run directory. The launcher's watchdog reads its modification time.
HEARTBEAT = "heartbeat"


class AtomicCheckpoints:
    """Save checkpoints atomically. This is a mixin, placed before a trainer of transformers."""

    _staging: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = directory / STAGING
        try:
            with staging(directory / STAGING):
                super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()  # until every rank has written its part
        # Remove this path in the staging directory. best_global_step is sufficient.
        self.state.best_model_checkpoint = None
        if self.args.should_save:
            self.state.save_to_json(str(directory / STAGING / name / TRAINER_STATE_NAME))
            seal(directory / STAGING / name, directory / name, directory.with_name(HEARTBEAT))
            clear_staging(directory)
            rotate(directory, self.args.save_total_limit, self.state.global_step)
        self.accelerator.wait_for_everyone()

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Consider only models that are saved. method.args.eval_steps may evaluate others, too."""
        return self.control.should_save and super()._determine_best_metric(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _keep_dtypes(self.model):
            super()._load_from_checkpoint(*args, **kwargs)

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of `checkpoint`, even if the model is sharded."""
        self.state.best_model_checkpoint = str(checkpoint)
        with _keep_dtypes(self.model):
            self._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        # Remove the pickled arguments, which nothing reads. config.yaml has them too.
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. record.json describes the run, and a card would not be written atomically."""


@contextlib.contextmanager
def _keep_dtypes(model: nn.Module) -> Iterator[None]:
    """Restore dtypes after the block. PEFT loads adapters in fp32, but nf4 trains them in bf16."""
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    yield
    for name, weight in model.named_parameters():
        if weight.dtype != dtypes[name]:
            weight.data = weight.data.to(dtypes[name])


def seal(staged: Path, target: Path, heartbeat: Path | None = None) -> None:
    """Write a manifest into `staged`, and rename the directory. Touch `heartbeat` while hashing."""
    files = {
        name: {"bytes": path.stat().st_size, "sha256": sha256(path, heartbeat)}
        for name, path in _files(staged).items()
    }
    write_json(staged / MANIFEST, {"files": files})
    move_directory(staged, target)


def newest(directory: Path, heartbeat: Path | None = None) -> Path | None:
    """Return the newest complete checkpoint in `directory`, or None. Report incomplete ones.

    Touch `heartbeat` while hashing.
    """
    for path in reversed(_checkpoints(directory)):
        error, best = find_error(path, heartbeat), best_of(path)
        if error is None and best not in (None, path) and (error := find_error(best, heartbeat)):
            error = f"its best checkpoint {best.name} is incomplete: {error}"
        if error is None:
            return path
        say(f"checkpoint {path} is incomplete: {error}. Looking for an older one")
    return None


def find_error(checkpoint: Path, heartbeat: Path | None = None) -> str | None:
    """Return how a checkpoint differs from its manifest, or None if it is complete."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())["files"]
        expected = {name: (file["bytes"], file["sha256"]) for name, file in manifest.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error!r})"
    try:
        files = _files(checkpoint)
        for name, (size, digest) in expected.items():
            if name not in files:
                return f"{name} is missing"
            if files[name].stat().st_size != size:
                return f"{name} has {files[name].stat().st_size} of {size} bytes"
            if sha256(files[name], heartbeat) != digest:
                return f"the contents of {name} have changed"
        # No run can resume without the trainer's state.
        if unnamed := sorted({*files, TRAINER_STATE_NAME} - expected.keys()):
            return f"{MANIFEST} does not name {unnamed[0]}"
    except OSError as error:
        return os_error_text(error)
    return None


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the files of a checkpoint other than its manifest, by relative path."""
    paths = (path for path in sorted(checkpoint.rglob("*")) if path.is_file())
    files = {str(path.relative_to(checkpoint)): path for path in paths}
    return {name: path for name, path in files.items() if name != MANIFEST}


def best_of(checkpoint: Path) -> Path | None:
    """Return the best checkpoint up to this one, or None if there is no method.selection."""
    # find_error reports a damaged file.
    step = (read_json(checkpoint / TRAINER_STATE_NAME) or {}).get("best_global_step")
    return checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{step}") if step else None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def rotate(directory: Path, limit: int | None, step: float = math.inf) -> None:
    """Delete all but the newest `limit` checkpoints up to `step`, and their best checkpoints.

    Later checkpoints are those that `newest` passed over.
    """
    if limit:
        checkpoints = _checkpoints(directory)
        newest = [path for path in checkpoints if step_of(path) <= step][-limit:]
        best = {best_of(path) for path in newest}
        for path in checkpoints:
            if path not in newest and path not in best:
                remove(path)


def clear_staging(directory: Path) -> None:
    """Remove the staging directory, which an interrupted save leaves behind."""
    shutil.rmtree(directory / STAGING, ignore_errors=True)


def _checkpoints(directory: Path) -> list[Path]:
    paths = directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    # Include files and broken links, which `newest` reports.
    numbered = [path for path in paths if path.name.rpartition("-")[2].isdecimal()]
    return sorted(numbered, key=step_of)
