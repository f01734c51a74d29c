"""What every recipe does around its work: read the configuration, obey signals, leave a result.json and an exit code."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from recipes.common import binding
from recipes.common.errors import UserError
from recipes.common.files import write_json

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 75  # 75 is EX_TEMPFAIL of sysexits.h: run it again
# torchrun's variables: a vLLM engine would take its own processes for ranks of ours.
TORCHRUN = re.compile(
    r"^(TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT))$"
)

_stop_asked = False


class Interrupted(Exception):
    """A signal asked to stop, and what can be continued is saved. `result` goes into result.json."""

    def __init__(self, **result: Any) -> None:
        super().__init__("interrupted")
        self.result = result


class Failed(Exception):
    """The outcome of the work is a failure: a benchmark below its gate, a loss that is no number. `result` goes into result.json."""

    def __init__(self, message: str, **result: Any) -> None:
        super().__init__(message)
        self.result = result


def stop_asked() -> bool:
    """Whether SIGTERM or SIGINT has reached this process."""
    return _stop_asked


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main_rank() -> bool:
    return rank() == 0


def say(line: str) -> None:
    """A line on stdout of the main rank, at once: the launcher follows the log."""
    if is_main_rank():
        print(line, flush=True)


def load_config(argv: list[str]) -> DictConfig:
    """The resolved configuration named by `--config`; a key that is not in it is refused where it is read."""
    parser = argparse.ArgumentParser(description="One rank of a recipe; launch/run.py starts it.")
    parser.add_argument("--config", type=Path, required=True, help="the resolved config.yaml of a run directory")
    config = OmegaConf.load(parser.parse_args(argv).config)
    OmegaConf.set_struct(config, True)
    return config


def run(work: Callable[[DictConfig], dict[str, Any]], argv: list[str] | None = None) -> int:
    """Call `work` with the configuration and write what it returns as result.json.

    Returns the exit code: 0 done, 2 a user's mistake, 75 interrupted with a checkpoint left, 1 anything else.
    """
    config = load_config(sys.argv[1:] if argv is None else argv)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # stacks of all threads into the log, where py-spy may not look
    for name in ("datasets.utils", "transformers.utils.logging"):  # of those that the recipe has imported
        if library := sys.modules.get(name):  # the launcher shows progress from metrics.jsonl, and a log holds no moving lines
            library.disable_progress_bar()
    accelerate = sys.modules.get("accelerate.utils.other")
    if accelerate and not str(OmegaConf.select(config, "topology.strategy")).startswith("zero"):
        accelerate.is_deepspeed_available = lambda: False  # it would import DeepSpeed, for 2 s, to ask whether the model is one of its
    handlers = {number: signal.signal(number, _ask_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _run(work, config)
    finally:
        _restore(handlers)  # after the result is written: torchrun asks the others to stop when the first rank has ended


def _run(work: Callable[[DictConfig], dict[str, Any]], config: DictConfig) -> int:
    try:
        how = OmegaConf.select(config, "topology.numa_binding")
        if how and torch.cuda.is_available() and "tuned" not in config:  # a tuning's trials are ranks of their own, and bind themselves
            print(binding.bind(how, binding.gpus(), int(os.environ["LOCAL_RANK"])), flush=True)
        result, exit_code = {"status": "done", **work(config)}, 0
    except Interrupted as interruption:
        result, exit_code = {"status": "interrupted", **interruption.result}, EXIT_INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        result, exit_code = {"status": "failed", "error": str(error)}, EXIT_USER
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        result, exit_code = {**failure.result, "status": "failed", "error": str(failure)}, EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        result, exit_code = {"status": "failed", "error": traceback.format_exception_only(error)[-1].strip()}, EXIT_FAILED
    # torchrun turns every exit code of a rank into 1, so the launcher reads it here.
    if exit_code in (EXIT_FAILED, EXIT_USER):
        _leave_failure(config, result["error"], exit_code)
    if is_main_rank():
        write_json(Path(config.run_dir) / "result.json", {**result, "exit_code": exit_code})
    return exit_code


def _leave_failure(config: DictConfig, error: str, exit_code: int) -> None:
    failure = {"rank": rank(), "time": time.time(), "error": error, "exit_code": exit_code}
    write_json(Path(config.run_dir) / "failures" / f"rank{rank()}.json", failure)


def give_up(config: DictConfig, error: str) -> NoReturn:
    """End this process at once, from any of its threads: for where another one waits for what cannot come any more."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    _leave_failure(config, error, EXIT_FAILED)
    os._exit(EXIT_FAILED)


def main(work: Callable[[DictConfig], dict[str, Any]]) -> None:
    """`run` as a program. Ends the process."""
    exit_code = run(work)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # One interpreter in six that ends with gloo's threads aborts ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _ask_stop(_number: int, _frame: Any) -> None:
    global _stop_asked
    _stop_asked = True


def _restore(handlers: dict[int, Any]) -> None:
    global _stop_asked
    _stop_asked = False
    for number, handler in handlers.items():
        signal.signal(number, handler)
