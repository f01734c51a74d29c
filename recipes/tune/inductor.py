"""Which way of compiling a recipe trains fastest: torch.compile's modes, the back ends of its matrix products, and its C++ wrapper.

Started by the launcher:

    1 GPU:   python launch/run.py hardware=mi350x method=tune/inductor model=qwen3_4b
    A few:   python launch/run.py hardware=mi350x method=tune/inductor model=qwen3_4b method.args.candidates=[default,triton,ck]

Each candidate is a run of the recipe in a process of its own, with caches of its own: what compiling costs is a column. One that does not
compile is a row with its error. Freezing inlines weights as constants, so inductor does it without gradients only (torch/_inductor/
compile_fx.py): no training is faster by it, and it is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.series import Column, Row, Table, measure_rows
from recipes.common.names import named
from recipes.common.program import main
from recipes.tune import trial
from recipes.tune.trial import Setting
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, require_first, trial_data

BACK_ENDS = "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"
CPP_WRAPPER = "TORCHINDUCTOR_CPP_WRAPPER"
MODE, BACK_END = "torch_compile_mode", "torch_compile_backend"
AS_IT_STANDS = "as it stands"  # a recipe that compiles already


def _compiled(mode: str | None = None, **env: str) -> Setting:
    return Setting({"torch_compile": True, **({MODE: mode} if mode else {})}, env)


# CUDA graphs are left out of the modes that choose products: one thing at a time; `max-autotune` has both.
_TUNED = "max-autotune-no-cudagraphs"
CANDIDATES = {
    "eager": Setting({"torch_compile": False}),
    "graphs-only": Setting({"torch_compile": True, BACK_END: "aot_eager"}),  # what is left of it without inductor
    "default": _compiled(),
    "reduce-overhead": _compiled("reduce-overhead"),
    "max-autotune-no-cudagraphs": _compiled(_TUNED),
    "max-autotune": _compiled("max-autotune"),
    "aten": _compiled(_TUNED, **{BACK_ENDS: "ATEN"}),
    "triton": _compiled(_TUNED, **{BACK_ENDS: "TRITON"}),
    "ck": _compiled(_TUNED, **{BACK_ENDS: "ATEN,TRITON,CK"}),
    "cktile": _compiled(_TUNED, **{BACK_ENDS: "ATEN,TRITON,CKTILE"}),
    "cpp": _compiled(_TUNED, **{BACK_ENDS: "ATEN,CPP"}),
    "cpp-wrapper": _compiled(**{CPP_WRAPPER: "1"}),
}
ROCM_ONLY = ("ck", "cktile")  # Composable Kernel is AMD's
CPU_ONLY = ("cpp",)


@dataclass
class InductorConfig(TrainingTuneConfig):
    """`candidates` null: all that this hardware has. Raises UserError."""

    candidates: list[str] | None = named(
        lambda: CANDIDATES,
        None,
        {"freezing": "makes weights constants, which training changes; inductor does it without gradients only. Leave it out."},
    )
    warmup: int = field(default=8, metadata={"least": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_filled("candidates")


def inductor(config: DictConfig) -> dict[str, Any]:
    args = InductorConfig(**OmegaConf.to_container(config.trainer_args))
    own = config.tuned.trainer_args
    settings, notes = candidates(args, own, str(config.hardware.gfx), config.hardware.vendor == "none")
    table = Table(
        "inductor",
        figure="tokens_per_second",
        columns=[Column("candidate", "candidate"), *TRAINING, Column("first_step_s", "first step s", 0)],
        notes=notes,
    )
    data = trial_data(config, args, own.per_device_train_batch_size * own.get("gradient_accumulation_steps", 1))

    def work(case: Row) -> Row:
        require_first(rows)
        name, setting = case["candidate"], settings[case["candidate"]]
        caches = {f"{of}_CACHE_DIR": str(trial.folder_of(config, name) / of.lower()) for of in ("TORCHINDUCTOR", "TRITON")}
        return trial.training(config, name, setting, args.steps, args.warmup, data, caches)

    rows: list[Row] = []
    measure_rows(config, args, table, [{"candidate": name} for name in settings], work, rows)
    return finish(config, table, rows, rows[0], [settings[row["candidate"]] for row in rows])


def candidates(args: InductorConfig, own: Mapping[str, Any], gfx: str, on_cpu: bool) -> tuple[dict[str, Setting], list[str]]:
    """Those to measure, the recipe as it stands first, and what is left out because this hardware has it not. `own` are the recipe's
    arguments: a mode or back end of its own is no part of a candidate."""
    lacking = (() if gfx.startswith("gfx") and not on_cpu else ROCM_ONLY) + (() if on_cpu else CPU_ONLY)
    asked = args.candidates or list(CANDIDATES)
    names = dict.fromkeys(["eager", *(name for name in asked if name not in lacking)])
    unset = {name: None for name in (MODE, BACK_END) if own.get(name)}
    found = {name: Setting({**unset, **CANDIDATES[name].args}, CANDIDATES[name].env) for name in names}
    if unset or own.get("torch_compile"):  # transformers compiles where a mode or a back end is given
        found = {AS_IT_STANDS: Setting(), **found}
    left_out = [name for name in asked if name in lacking]
    notes = ["freezing is for inference: inductor does it without gradients only, so no training is faster by it."]
    return found, notes + ([f"left out, because this hardware has them not: {', '.join(left_out)}."] if left_out else [])


if __name__ == "__main__":
    main(inductor)
