"""metrics.jsonl and the line a logged step prints."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.common.device import memory_peak_gb
from recipes.common.files import append
from recipes.common.flops import flops_per_token
from recipes.common.program import Failed, is_main_rank, say
from recipes.common.step_shares import KINDS, Stopwatch
from recipes.common.telemetry import Telemetry

# TRL's names that say nothing of their unit, or that a resumed run would count from zero.
RENAMED = {"eval_runtime": "eval_s"}
COUNTED_HERE = ("num_tokens", "epoch", "step_time")  # the last leaves out the optimizer's step
HELD_OUT = "eval_"  # before the figures of held-out rows
OF_NO_USE = ("eval_num_tokens", "eval_samples_per_second", "eval_steps_per_second")


class Metrics(TrainerCallback):
    """Appends a line to metrics.jsonl for each logged step and prints a short one.

    `peak_tflops` is that of one GPU for the precision of the run, None where it is unknown. `reference` says that every token also
    goes through a frozen copy of the model. `stopwatch` has the seconds of a step by kind.
    """

    def __init__(self, config: DictConfig, reference: bool = False, stopwatch: Stopwatch | None = None) -> None:
        self.telemetry = Telemetry(None)  # recipes/common/training.py puts the rank's own here
        self.path = Path(config.run_dir) / "metrics.jsonl"
        self.peak_tflops = config.hardware.peak_tflops.get(config.precision.compute)
        self.reference, self.stopwatch = reference, stopwatch
        self.last: dict[str, Any] = {}
        self.first_tokens = 0
        self.waiting: dict[str, Any] = {}  # the line of a step whose held-out figures are still to come
        self.loading_gb = memory_peak_gb()  # DeepSpeed 0.19 resets torch's counter when it is set up (runtime.utils.empty_cache)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.begin(state)

    def begin(self, state: TrainerState) -> None:
        """Continue after the step of `state`, which is 0 for a new run: later lines are dropped, clocks and counts go on."""
        kept = drop_after(self.path, state.global_step) if is_main_rank() else []
        self.last = kept[-1] if kept else {}
        self.first_step, self.previous_step = state.global_step, state.global_step
        self.began = self.previous_time = time.monotonic()
        self.previous_tokens = state.num_input_tokens_seen
        self.evaluated_s = 0.0  # of the time since `began`
        self.first_tokens, self.first_time_s = self.last.get("num_tokens", 0), self.last.get("time_s", 0.0)
        self.telemetry.begin(self.began)
        if self.stopwatch is not None:
            self.stopwatch.take()  # seconds before the first step belong to none

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> None:
        diverged = not math.isfinite(logs.get("loss", 0.0))  # the mean of all ranks, so all of them end here
        if is_main_rank():
            self._log(args, state, control, logs, model, diverged)
        if diverged:
            raise Failed(
                f"the loss of step {state.global_step} is {logs['loss']}: the training diverged. Lower method.args.learning_rate "
                f"({args.learning_rate:g}) or method.args.max_grad_norm ({args.max_grad_norm:g}), or compute in a wider precision. "
                "Checkpoints saved since the figures went astray are of no use."
            )

    def _log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], model: Any, diverged: bool
    ) -> None:
        if self.waiting and f"{HELD_OUT}loss" in logs:
            self._write({**self.waiting, **self._of_heldout(logs)}, state)
        if "loss" not in logs:  # the summary at the end of training has none
            return
        now = getattr(state, "logged_at", None) or time.monotonic()  # of a line that is written while the next step runs
        row = {
            "step": state.global_step,
            "num_steps": state.max_steps,
            "time_s": self.first_time_s + now - self.began,
            **{RENAMED.get(k, k): v for k, v in logs.items() if k not in COUNTED_HERE},
            **self._speed(args, state, logs.get("num_tokens", self.previous_tokens), model, now),  # GRPO counts where it generates
            "memory_peak_gb": max(self.loading_gb, memory_peak_gb()),
            **self.telemetry.take(),
        }
        if control.should_evaluate and not diverged:  # a step is one line
            self.waiting = row
        else:
            self._write(row, state)

    def _write(self, row: dict[str, Any], state: TrainerState) -> None:
        self.last, self.waiting = {key: _finite(value) for key, value in row.items()}, {}
        append(self.path, self.last)
        say(progress_line(self.last, (time.monotonic() - self.began) / (state.global_step - self.first_step)))

    def _of_heldout(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Figures of held-out rows. The time that they took is none of the next step's."""
        self.previous_time += logs["eval_runtime"]
        self.evaluated_s += logs["eval_runtime"]
        return {RENAMED.get(k, k): v for k, v in logs.items() if k.startswith(HELD_OUT) and k not in OF_NO_USE}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:  # the mean loss since the last line is no part of a checkpoint, so none may be pending
            control.should_log = True

    def summary(self) -> dict[str, Any]:
        """Figures of the last line, and speed over all steps of this process."""
        elapsed, steps = self.previous_time - self.began - self.evaluated_s, self.previous_step - self.first_step
        tokens = self.num_tokens()
        speed = {"step_s": elapsed / steps, "tokens_per_second": tokens / elapsed} if steps else {}
        return {**{k: v for k, v in self.last.items() if k in ("loss", "reward", "mfu", "tflops_per_gpu", "memory_peak_gb")}, **speed}

    def num_tokens(self) -> int:
        """Of all ranks, in the steps of this process; known to the main rank."""
        return int(self.last.get("num_tokens", 0) - self.first_tokens)

    def _speed(self, args: TrainingArguments, state: TrainerState, tokens: int, model: Any, now: float) -> dict[str, Any]:
        done, steps = tokens - self.previous_tokens, state.global_step - self.previous_step
        step_s = (now - self.previous_time) / steps
        per_second = done / (now - self.previous_time)
        rows = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        # Rows packed from documents attend within each of these; how long they are is not known here, so attention is left out.
        reach = 0.0 if getattr(args, "packing", False) else done / rows
        tflops = per_second / args.world_size * flops_per_token(model, reach, self.reference) / 1e12
        self.previous_tokens, self.previous_step, self.previous_time = tokens, state.global_step, now
        return {
            "step_s": step_s,
            **self._shares(step_s, steps),
            "num_tokens": self.last.get("num_tokens", self.first_tokens) + done,
            "tokens_per_second": per_second,
            "tokens_per_second_per_gpu": per_second / args.world_size,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }

    def _shares(self, step_s: float, steps: int) -> dict[str, float]:
        """Return the seconds of a step by kind, means since the line before; those of KINDS and `train_s` sum to `step_s`."""
        if self.stopwatch is None:
            return {}
        seconds = {kind: total / steps for kind, total in self.stopwatch.take().items()}
        rest = step_s - sum(seconds[kind] for kind in KINDS)
        return {**{f"{kind}_s": mean for kind, mean in seconds.items()}, "train_s": rest}


def drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of steps after `step`, which will be done again, and a last line cut off. Returns the lines kept."""
    if not path.is_file():
        return []
    whole = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in whole if line.endswith("\n")]
    kept = [row for row in rows if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(path)
    return kept


def progress_line(row: dict[str, Any], step_s: float) -> str:
    """step 40/400  loss 0.912  reward 0.512  12,345 tok/s  eta 1:05"""
    minutes, seconds = divmod(round(step_s * (row["num_steps"] - row["step"])), 60)
    parts = [f"step {row['step']}/{row['num_steps']}"]
    parts += [f"{key} {row[key]:.4g}" for key in ("loss", "eval_loss", "reward", "accuracy", "pass_rate") if row.get(key) is not None]
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tok/s")
    return "  ".join([*parts, f"eta {minutes}:{seconds:02d}"])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
