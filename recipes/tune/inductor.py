"""Find the torch.compile options that train a recipe fastest.

Candidates are modes, back ends of matrix products, and the C++ wrapper. Each one is a run of the
recipe with empty caches, so first_step_s includes the time to compile. If a candidate does not
compile, or its losses differ from the unchanged recipe's, its row has the error. Freezing is
rejected: it turns weights into constants, which Inductor only supports without gradients
(torch/_inductor/compile_fx.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench.benchmark import Row, Table
from recipes.rank.names import name_field
from recipes.rank.program import main
from recipes.tune.trial import Setting, trial_folder
from recipes.tune.tuning import TRAINING, TrainingTuneConfig, finish, measure_trials, training

BACK_ENDS = "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"
CPP_WRAPPER = "TORCHINDUCTOR_CPP_WRAPPER"
MODE, BACK_END = "torch_compile_mode", "torch_compile_backend"
AS_IT_STANDS = "as it stands"  # the unchanged recipe, if it already compiles


def _compiled(mode: str | None = None, **env: str) -> Setting:
    return Setting({"torch_compile": True, **({MODE: mode} if mode else {})}, env)


# Back ends are compared in this mode. `max-autotune` would also use CUDA graphs.
_TUNED = "max-autotune-no-cudagraphs"
CANDIDATES = {
    "eager": Setting({"torch_compile": False}),
    "graphs-only": Setting({"torch_compile": True, BACK_END: "aot_eager"}),  # without Inductor
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
    # The two parts of max-autotune.
    "gemm-autotune": _compiled(TORCHINDUCTOR_MAX_AUTOTUNE_GEMM="1"),
    "pointwise-autotune": _compiled(TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE="1"),
    # Channels-last convolutions, as AMD's workload guide sets them.
    "layout": _compiled(TORCHINDUCTOR_LAYOUT_OPTIMIZATION="1", PYTORCH_MIOPEN_SUGGEST_NHWC="1"),
}
ON_REQUEST = ("layout",)  # only changes convolutions, which the language models do not have
ROCM_ONLY = ("ck", "cktile")  # AMD's Composable Kernel
CPU_ONLY = ("cpp",)
# Modes with CUDA graphs, which are only tried on AMD if they are named. An MI300X trained worse
# with them, without an error (pytorch#187715: torch 2.10, ROCm 7.0). AMD could not reproduce it on
# an MI250X (torch 2.14, ROCm 7.14). On MI350X, graphs ended processes with torch 2.13 and ROCm 7.1
# (pytorch/helion#3471).
GRAPHS = ("reduce-overhead", "max-autotune")
# Largest relative difference between the mean losses of a candidate and of the unchanged recipe.
# Rounding changes less: compiled layers differ by 0.001 after 12 steps (base/hopper.yaml).
LOSS_DIFFERENCE = 0.02


@dataclass
class InductorConfig(TrainingTuneConfig):
    """Arguments. `candidates` null: all that this hardware supports, except ON_REQUEST.

    On AMD, null also omits GRAPHS. `compile_threads` null: torch's default, one per core but at
    most 32.
    """

    candidates: list[str] | None = name_field(
        lambda: CANDIDATES,
        None,
        {"freezing": "turns weights into constants, but training changes them. Leave it out."},
    )
    warmup: int = field(default=8, metadata={"minimum": 1})
    compile_threads: int | None = field(default=None, metadata={"minimum": 1})


def inductor(config: DictConfig) -> dict[str, Any]:
    args = InductorConfig(**OmegaConf.to_container(config.trainer_args))
    recipe_args, on_cpu = config.tuned.trainer_args, config.hardware.vendor == "none"
    settings, notes = candidates(args, recipe_args, str(config.hardware.gfx), on_cpu)
    shown = f"candidate {TRAINING} first_step_s mean_loss"
    table = Table("inductor", shown, figure="tokens_per_second", notes=notes)

    def work(case: Row) -> Row:
        name = case["candidate"]
        folder = trial_folder(config, name)
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        if args.compile_threads:
            caches["TORCHINDUCTOR_COMPILE_THREADS"] = str(args.compile_threads)
        return training(config, args, name, settings[name], caches)

    rows = measure_trials(config, args, table, [{"candidate": name} for name in settings], work)
    if args.rows == "full":  # generated rows differ between trials
        rows = [check_loss(row, rows[0]) for row in rows]
    return finish(config, table, rows, rows[0], [settings[row["candidate"]] for row in rows])


def check_loss(row: Row, before: Row) -> Row:
    """Return the row, with an error if its mean loss is not that of the row `before`."""
    loss, expected = row.get("mean_loss"), before.get("mean_loss")
    if None in (loss, expected) or math.isclose(loss, expected, rel_tol=LOSS_DIFFERENCE):
        return row
    return {**row, "error": f"mean loss {loss:.4g} instead of {expected:.4g}: trains differently"}


def candidates(
    args: InductorConfig, recipe_args: Mapping[str, Any], gfx: str, on_cpu: bool
) -> tuple[dict[str, Setting], list[str]]:
    """Return the candidates, and notes on those that were left out.

    The first candidate is the unchanged recipe. Other candidates unset
    the mode and back end in `recipe_args`.
    """
    on_amd = gfx.startswith("gfx") and not on_cpu
    unsupported = () if on_amd else ROCM_ONLY
    unsupported += () if on_cpu else CPU_ONLY
    graphs = GRAPHS if on_amd else ()
    on_request = (*ON_REQUEST, *graphs)
    names = args.candidates or [name for name in CANDIDATES if name not in on_request]
    omitted = [name for name in names if name in unsupported]
    unset = {name: None for name in (MODE, BACK_END) if recipe_args.get(name)}
    settings = {
        name: Setting({**unset, **CANDIDATES[name].args}, CANDIDATES[name].env)
        for name in dict.fromkeys(["eager", *names])
        if name not in unsupported
    }
    # transformers compiles if a mode or a back end is set.
    if unset or recipe_args.get("torch_compile"):
        settings = {AS_IT_STANDS: Setting(), **settings}
    notes = ["freezing is not tried, because Inductor supports it only for inference."]
    if graphs and not args.candidates:
        notes.append(
            f"{' and '.join(graphs)} are only tried if you name them: on an MI300X, CUDA graphs "
            "trained worse without an error (pytorch#187715)."
        )
    if omitted:
        notes.append(f"Left out, because this hardware does not support it: {', '.join(omitted)}.")
    return settings, notes


if __name__ == "__main__":
    main(inductor)
