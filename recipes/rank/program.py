"""Run a recipe: read the configuration, handle signals, write result.json, exit with a code."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import EXIT_INTERRUPTED, EXIT_USER, UserError
from launch.core.json_files import write_json
from launch.core.packages import packages
from recipes.rank.device import bind_to_cores

EXIT_FAILED = 1  # of a rank, as for an exception in Python; the launcher's is 4
# torchrun's variables. With them, a vLLM engine would treat its own processes as our ranks.
TORCHRUN = re.compile(
    r"^(TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|MASTER_(ADDR|PORT)|"
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME))$"
)

_stop_requested = False


class Interrupted(Exception):
    """Report that a signal stopped the work, which can resume. `result` goes to result.json."""

    def __init__(self, **result: Any) -> None:
        super().__init__("interrupted")
        self.result = result


class Failed(Exception):
    """Report that the work failed, such as a benchmark below its gate or a loss that is not finite.

    `result` goes to result.json.
    """

    def __init__(self, message: str, **result: Any) -> None:
        super().__init__(message)
        self.result = result


class ServerLost(Failed):
    """Report that the generation server has ended.

    The main rank broadcasts this in place of completions, so iterating over it raises it.
    """

    def __iter__(self) -> Iterator[Any]:
        raise self


def stop_requested() -> bool:
    """Return whether SIGTERM or SIGINT has reached this process."""
    return _stop_requested


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main_rank() -> bool:
    return rank() == 0


def say(line: str) -> None:
    """Print a line on the main rank, and flush it because the launcher follows the log.

    torchrun does not buffer, so print() would write the end of the line separately, and a warning
    on stderr could come before it.
    """
    if is_main_rank():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def run(work: Callable[[DictConfig], dict[str, Any]], argv: list[str] | None = None) -> int:
    """Call `work` with the configuration and write its return value as result.json.

    Return the exit code: 0 done, 1 failed, 2 wrong configuration, 75 interrupted with a checkpoint.
    """
    global _stop_requested
    parser = argparse.ArgumentParser(description="One rank of a recipe; launch/run.py starts it.")
    parser.add_argument(
        "--config", type=Path, required=True, help="the resolved config.yaml of a run directory"
    )
    config = OmegaConf.load(parser.parse_args(sys.argv[1:] if argv is None else argv).config)
    OmegaConf.set_struct(config, True)  # reading a missing key raises an error
    if hasattr(signal, "SIGUSR1"):
        # Log the stacks of all threads, for systems where py-spy is not permitted.
        faulthandler.register(signal.SIGUSR1)
    for name in ("datasets.utils", "transformers.utils.logging"):
        # The launcher shows progress from metrics.jsonl, and progress bars would clutter the log.
        if library := sys.modules.get(name):
            library.disable_progress_bar()
    accelerate = sys.modules.get("accelerate.utils.other")
    if accelerate and not str(OmegaConf.select(config, "topology.strategy")).startswith("zero"):
        # accelerate would import DeepSpeed (2 s) only to test whether the model is a DeepSpeed one.
        accelerate.is_deepspeed_available = lambda: False
    handlers = {
        number: signal.signal(number, _request_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        result = _result(work, config)
        # torchrun turns every nonzero exit code of a rank into 1, so the launcher reads a file.
        if result["exit_code"] in (EXIT_FAILED, EXIT_USER):
            _write_failure(config, result["error"], result["exit_code"])
        if is_main_rank():
            write_json(Path(config.run_dir) / "result.json", result)
        return int(result["exit_code"])
    finally:
        # Not earlier, because torchrun signals the other ranks as soon as one rank ends.
        _stop_requested = False
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _result(work: Callable[[DictConfig], dict[str, Any]], config: DictConfig) -> dict[str, Any]:
    try:
        if is_main_rank():  # for the record, because the launcher may run another Python
            write_json(Path(config.run_dir) / "packages.json", packages())
        numa = OmegaConf.select(config, "topology.numa_binding")
        # The ranks of a tuning run's trials bind themselves.
        if numa and torch.cuda.is_available() and "tuned" not in config:
            print(bind_to_cores(numa, int(os.environ.get("LOCAL_RANK", "0"))), flush=True)
        return {"status": "done", **work(config), "exit_code": 0}
    except Interrupted as interruption:
        outcome = {"status": "interrupted", "exit_code": EXIT_INTERRUPTED}
        return {**outcome, **interruption.result}
    except (UserError, Failed) as error:
        # A data loader's worker puts its traceback before the message.
        text = str(error).rpartition(f"{UserError.__module__}.UserError: ")[2].strip()
        print(f"error: {text}", file=sys.stderr, flush=True)
        exit_code = EXIT_USER if isinstance(error, UserError) else EXIT_FAILED
        outcome = {"status": "failed", "error": text, "exit_code": exit_code}
        return {**getattr(error, "result", {}), **outcome}
    except Exception as error:
        traceback.print_exc()
        summary = traceback.format_exception_only(error)[-1].strip()
        return {"status": "failed", "error": summary, "exit_code": EXIT_FAILED}


def _write_failure(config: DictConfig, error: str, exit_code: int) -> None:
    failure = {"rank": rank(), "time": time.time(), "error": error, "exit_code": exit_code}
    write_json(Path(config.run_dir) / "failures" / f"rank{rank()}.json", failure)


def give_up(config: DictConfig, error: str) -> NoReturn:
    """Exit immediately, from any thread, because another thread would wait forever."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    _write_failure(config, error, EXIT_FAILED)
    os._exit(EXIT_FAILED)


def main(work: Callable[[DictConfig], dict[str, Any]]) -> None:
    """Call `run`, and exit the process with its exit code."""
    exit_code = run(work)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # With gloo's threads, one normal interpreter exit in six aborts ("terminate called without
        # an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _request_stop(_number: int, _frame: Any) -> None:
    global _stop_requested
    _stop_requested = True
