"""Write metrics.jsonl, and print a line for each logged step."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.core.json_files import metrics_lines, write_text
from recipes.measure.flops import flops_per_token
from recipes.measure.telemetry import Telemetry
from recipes.rank import ranks
from recipes.rank.device import memory_now_gb, memory_peak_gb
from recipes.rank.files import append
from recipes.rank.program import Failed, is_main_rank, say
from recipes.training.step_shares import KINDS, Stopwatch

RENAMED = {"eval_runtime": "eval_s"}  # TRL's name has no unit
# TRL's counts restart from zero in a resumed run, and its step_time excludes the optimizer.
OMITTED = ("num_tokens", "epoch", "step_time")
HELD_OUT = "eval_"
SUMMARY_KEYS = (
    *("loss", "reward", "mfu", "tflops_per_gpu", "memory_peak_gb"),
    *("gpu_memory_bandwidth_share", "gpu_memory_bandwidth_gb_s"),
)
# Logged steps without a difference between a prompt's rewards until the run warns: from the start,
# and after a step with a difference.
NEVER_DIFFERED, NO_LONGER_DIFFER = 5, 20
MOSTLY = 0.9
ROUNDING = 1e-6  # of the deviation of equal rewards
OMITTED_HELD_OUT = ("eval_num_tokens", "eval_samples_per_second", "eval_steps_per_second")


class Metrics(TrainerCallback):
    """Append a line to metrics.jsonl for each logged step, and print a short line.

    `reference` is whether every token also goes through a frozen copy of the model. `stopwatch`
    measures the seconds of a step by kind.
    """

    def __init__(
        self, config: DictConfig, reference: bool = False, stopwatch: Stopwatch | None = None
    ) -> None:
        self.telemetry = Telemetry(None)  # train_loop.py replaces it
        self.path = Path(config.run_dir) / "metrics.jsonl"
        self.peak_tflops = config.hardware.peak_tflops.get(config.precision.compute)
        self.reference, self.stopwatch = reference, stopwatch
        self.config = config
        self.last: dict[str, Any] = {}
        self.first_tokens = 0
        self.step_rows = 0  # rows of all ranks in an optimizer step
        self.pending: dict[str, Any] = {}  # the line of a step, until held-out rows are evaluated
        # DeepSpeed 0.19 resets torch's peak during its setup (runtime.utils.empty_cache).
        self.loading_gb = memory_peak_gb()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin(state)

    def begin(self, state: TrainerState) -> None:
        """Start after the step of `state` (0 for a new run), and drop later lines."""
        lines = drop_after(self.path, state.global_step) if is_main_rank() else []
        self.last = lines[-1] if lines else {}
        self.differed_at, self.num_equal = 0, 0  # last step with different rewards; lines since
        for line in lines:
            self._compare_rewards(line)
        self.first_step, self.previous_step = state.global_step, state.global_step
        self.start_time = self.previous_time = time.monotonic()
        self.previous_tokens = state.num_input_tokens_seen
        self.evaluation_s = 0.0  # since `start_time`
        self.first_tokens = self.last.get("num_tokens", 0)
        self.first_time_s = self.last.get("time_s", 0.0)
        self.telemetry.begin(self.start_time)
        if self.stopwatch is not None:
            self.stopwatch.take()  # discard seconds before the first step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        # The loss is the mean over all ranks, so all ranks stop here.
        diverged = not math.isfinite(logs.get("loss", 0.0))
        if is_main_rank():
            self.write_held_out(state, logs)
        if is_main_rank() and "loss" in logs:  # TRL's final summary has no loss
            # FastStep logs a step while the next one runs, so it records the time itself.
            now = getattr(state, "logged_at", None) or time.monotonic()
            # GRPO logs tokens only after generating.
            tokens = logs.get("num_tokens", self.previous_tokens)
            row = {
                "step": state.global_step,
                "num_steps": state.max_steps,
                "time_s": self.first_time_s + now - self.start_time,
                **{RENAMED.get(k, k): v for k, v in logs.items() if k not in OMITTED},
                **self._speed(args, state, tokens, model, now),
                "memory_peak_gb": max(self.loading_gb, memory_peak_gb()),
                **memory_now_gb(),
                **self.telemetry.take(),
            }
            if control.should_evaluate and not diverged:
                self.pending = row
            else:
                self._write(row, state)
        if diverged:
            raise Failed(
                f"the loss of step {state.global_step} is {logs['loss']}: the training diverged. "
                f"Lower method.args.learning_rate ({args.learning_rate:g}) or "
                f"method.args.max_grad_norm ({args.max_grad_norm:g}), or use a wider precision. "
                "Do not use checkpoints from after the loss began to rise."
            )

    def write_held_out(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Add held-out metrics to the pending line of their step, and write it.

        Before the first step, they are a line of their own.
        """
        is_first = state.global_step == 0 and not self.last
        if f"{HELD_OUT}loss" not in logs or not (self.pending or is_first):
            return
        seconds = self.first_time_s + time.monotonic() - self.start_time
        start = {"step": 0, "num_steps": state.max_steps, "time_s": seconds}
        # Exclude the evaluation from the time of the next step.
        self.previous_time += logs["eval_runtime"]
        self.evaluation_s += logs["eval_runtime"]
        held_out = {
            RENAMED.get(k, k): v
            for k, v in logs.items()
            if k.startswith(HELD_OUT) and k not in OMITTED_HELD_OUT
        }
        self._write({**(self.pending or start), **held_out}, state)

    def _write(self, row: dict[str, Any], state: TrainerState) -> None:
        self.last, self.pending = {}, {}
        for key, value in row.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            self.last[key] = value if is_finite else None
        append(self.path, self.last)
        steps = state.global_step - self.first_step
        elapsed = time.monotonic() - self.start_time
        say(progress_line(self.last, elapsed / steps if steps else None))
        self._compare_rewards(self.last)
        if self.num_equal == (NO_LONGER_DIFFER if self.differed_at else NEVER_DIFFERED):
            say(f"! {self.reward_warning()}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint does not contain the losses since the last line, so log a line first.
        # Held-out metrics are added to the line of their step.
        if control.should_save or control.should_evaluate:
            control.should_log = True

    def summary(self) -> dict[str, Any]:
        """Return metrics of the last line, and the speed over all steps of this process."""
        elapsed = self.previous_time - self.start_time - self.evaluation_s
        steps = self.previous_step - self.first_step
        shown = {key: self.last[key] for key in SUMMARY_KEYS if key in self.last}
        if self.num_equal >= (NO_LONGER_DIFFER if self.differed_at else 1):
            shown["warning"] = self.reward_warning()
        if not steps:
            return shown
        per_second = self.num_tokens() / elapsed
        return {
            **shown,
            "step_s": elapsed / steps,
            "training_hours": self.last["time_s"] / 3600,
            "samples_per_second": steps * self.step_rows / elapsed,
            "tokens_per_second": per_second,
            "tokens_per_second_per_gpu": per_second / ranks.num_ranks(),
        }

    def _compare_rewards(self, row: dict[str, Any]) -> None:
        """Count the lines since one in which the completions of a prompt had different rewards."""
        equal_share = row.get("frac_reward_zero_std")  # only GRPO has it
        # The deviation of equal rewards may be 1e-8. Without any reward that applies it is NaN,
        # which the row has as None.
        if equal_share is not None and (row["reward_std"] or 0.0) > ROUNDING:
            self.differed_at, self.num_equal = row["step"], 0
        elif equal_share is not None:
            self.num_equal += 1

    def reward_warning(self) -> str:
        """Explain that equal rewards have taught nothing since `differed_at`."""
        steps, reward = self.last["step"] - self.differed_at, self.last["reward"]
        value = "no reward applies" if reward is None else f"reward {reward:.3g}"
        problem = (
            f"no completion of the last {steps} step(s) was better than another of its prompt "
            f"({value}), so nothing was learned"
        )
        model = self.config.model
        if model.init == "random" and model.path is None:
            return f"As expected of random weights, {problem}. Use: a trained model."
        if (self.last.get("completions/clipped_ratio") or 0) > MOSTLY:
            return f"{problem}. Most were cut off: use a longer method.args.max_completion_length."
        problems = "harder problems" if reward else "easier problems or a stronger model"
        return (
            f"{problem}. data.preview=3 shows the rewards of known answers. If they are right, use "
            f"{problems}."
        )

    def num_tokens(self) -> int:
        """Return the tokens of all ranks in this process's steps. Valid on the main rank only."""
        return int(self.last.get("num_tokens", 0) - self.first_tokens)

    def _speed(
        self, args: TrainingArguments, state: TrainerState, tokens: int, model: Any, now: float
    ) -> dict[str, Any]:
        new_tokens, steps = tokens - self.previous_tokens, state.global_step - self.previous_step
        step_s = (now - self.previous_time) / steps
        per_second = new_tokens / (now - self.previous_time)
        self.step_rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        rows = steps * self.step_rows
        # Packed documents attend only within themselves, and their lengths are unknown here, so
        # omit attention.
        length = 0.0 if getattr(args, "packing", False) else new_tokens / rows
        flops = flops_per_token(model, length, self.reference)
        tflops = per_second / args.world_size * flops / 1e12
        self.previous_tokens, self.previous_step = tokens, state.global_step
        self.previous_time = now
        shares = {}  # mean seconds per step by kind since the last line; they sum to `step_s`
        if self.stopwatch is not None:
            seconds = {kind: total / steps for kind, total in self.stopwatch.take().items()}
            shares = {f"{kind}_s": mean for kind, mean in seconds.items()}
            shares["train_s"] = step_s - sum(seconds[kind] for kind in KINDS)
        return {
            "step_s": step_s,
            **shares,
            "num_tokens": self.last.get("num_tokens", self.first_tokens) + new_tokens,
            "samples_per_second": self.step_rows / step_s,
            "tokens_per_second": per_second,
            "tokens_per_second_per_gpu": per_second / args.world_size,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }


def drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of steps after `step` and damaged lines. Return the remaining lines."""
    lines, problems = metrics_lines(path)
    rows = [row for row in lines if row["step"] <= step]
    if problems:
        say(f"{path}: removing {len(problems)} damaged line(s), the first is {problems[0]}")
    if len(rows) < len(lines):
        last = lines[-1]["step"]
        say(f"repeating the steps after {step} up to {last}, which no whole checkpoint contains")
    if path.is_file():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def progress_line(row: dict[str, Any], step_s: float | None) -> str:
    """Return a line such as `step 40/400 loss 0.912 reward 0.512 12,345 tok/s eta 1:05`."""
    parts = [f"step {row['step']}/{row['num_steps']}"]
    parts += [
        f"{key} {row[key]:.4g}"
        for key in ("loss", "eval_loss", "reward", "accuracy", "pass_rate")
        if row.get(key) is not None
    ]
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tok/s")
    if step_s is not None:
        minutes, seconds = divmod(round(step_s * (row["num_steps"] - row["step"])), 60)
        parts.append(f"eta {minutes}:{seconds:02d}")
    return "  ".join(parts)
