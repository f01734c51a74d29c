"""What every recipe does around its own work: read the run's configuration, end with a result.json, and stop when asked."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import TrainerCallback

from recipes.common.errors import UserError

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: the launcher resumes it


def main(program: Callable[[DictConfig], dict[str, Any]]) -> None:
    """Run `program(config)` and leave what it returns as result.json, whose `status` is done, interrupted or failed."""
    parser = argparse.ArgumentParser(description=sys.modules[program.__module__].__doc__)
    parser.add_argument("--config", required=True, help="config.yaml of a run directory, as the launcher writes it")
    config = OmegaConf.load(parser.parse_args().config)
    run_dir = Path(config.run_dir)
    try:
        result = program(config)
    except UserError as error:
        write_result(run_dir, {"status": "failed", "exit_code": 2, "error": str(error)})
        print(error, file=sys.stderr)
        sys.exit(2)
    except BaseException as error:
        write_result(run_dir, {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise
    write_result(run_dir, result)
    print(f"{config.method.name}: {result['status']}; {summary(result)}")
    sys.exit(EXIT_INTERRUPTED if result["status"] == "interrupted" else 0)


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    if is_first_rank():
        write_whole(run_dir / "result.json", json.dumps(result, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def summary(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, (int, float)) and not isinstance(value, bool))


class StopWhenAsked(TrainerCallback):
    """SIGTERM or SIGINT: finish the step, save a checkpoint, stop. Made before the long imports of a trainer's first step."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame: Any) -> None:
        self.asked = True
        print(f"signal {number}: stops after this step", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if self.asked:
            control.should_save = control.should_training_stop = True
        return control
