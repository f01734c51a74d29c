"""Check model, data, rewards, packages and run_root against the file system.

Each check raises UserError with one message. None imports the training stack or runs a user's code.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path

from containers import images
from launch.config.smoke import LOW_PRECISION
from launch.config.wording import HUB
from launch.core.errors import UserError, near
from launch.core.json_lines import json_rows
from launch.inputs import model_path, tracking
from launch.inputs.adapter_files import check_adapter
from launch.inputs.jsonl_files import check_data_files, check_is_file
from launch.inputs.reading import near_files
from launch.plan import tuned
from launch.plan.export_files import check_export, check_not_a_run
from launch.plan.rundir import runs_in
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Init
from launch.schema.trainer_args import argument

PLAN_LINES = 10_000  # lines of a data file that mode=plan reads; a run reads all
MODULES = {"azureml-core": "azureml"}  # packages that are imported by another name
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# Columns of TRL's data set formats; a file's rows need every column of one of the alternatives.
COLUMNS = {
    "sft": (("messages",), ("text",), ("prompt", "completion")),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "grpo": (("prompt",),),
    "evaluate": (("prompt", "answer"),),
}
COLUMNS["tokenizer"] = COLUMNS["sft"]


def check_files(config: Config, all_lines: bool) -> None:
    config = tuned.recipe(config) or config  # a tuning's recipe reads the files
    _model(config)
    check_adapter(config)
    check_export(config)
    if config.data.kind == "jsonl":
        # An evaluation holds out some rows, makes a tokenizer from them, or neither.
        rows = reader = config.method.rows or "nothing"
        if config.method.measures_model:
            makes_tokenizer = config.model.path is None and config.model.init == Init.random
            reader = "tokenizer" if makes_tokenizer else "nothing"
            reader = "evaluate" if config.data.heldout_fraction else reader
        held_out = rows if config.method.selection.metric else "evaluate"
        for key, path, method in (
            ("data.path", config.data.path, reader),
            ("data.heldout_path", config.data.heldout_path, held_out),
        ):
            if path is not None:
                _jsonl(key, Path(path), method, all_lines)
    check_data_files(config)
    _tuned_products(config)
    _rewards(config)
    _packages(config)
    root = Path(config.run_root)
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(
            f"run_root={root}: {nearest} is not a directory that you may write to. Choose another: "
            "run_root=<directory>."
        )


def _tuned_products(config: Config) -> None:
    """Check that TunableOp's file exists, because TunableOp silently runs without it.

    It puts the GPU's number before the suffix.
    """
    name = config.user_env.get("PYTORCH_TUNABLEOP_FILENAME")
    if name is None or config.user_env.get("PYTORCH_TUNABLEOP_TUNING") != "0":
        return
    numbered = re.sub(r"(\.[^.]*)?$", r"0\1", name, count=1)
    first = Path(name.replace("%d", "0") if "%d" in name else numbered)
    if not Path(name).is_absolute() or not first.is_file():
        raise UserError(
            f"user_env.PYTORCH_TUNABLEOP_FILENAME={name}: there is no {first}. Use: the whole path "
            "that method=tune/tunableop printed."
        )


def _model(config: Config) -> None:
    path = config.model.path and Path(config.model.path)
    if not path:
        return
    check_not_a_run(path)
    if not path.is_dir():
        name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        is_hub_id = not name.is_absolute() and len(name.parts) == 2 and not path.parent.is_dir()
        hint = HUB.format(name) if is_hub_id else ""
        fault = f"no such directory.{near_files(path)}{hint}"
        if path.is_file():
            fault = "a file, not a directory. Convert a GGUF file: python -m recipes.from_gguf."
        raise UserError(f"model.path={path}: {fault}")
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path={path}: no config.json; a model directory has config.json, "
            f"*.safetensors and a tokenizer.{runs_in(path)}"
        )
    if not list(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
        fault = "no *.safetensors; weights are needed."
        if pickles:
            fault = (
                f"only a pickle checkpoint ({pickles[0]}), which can run any code when it is "
                "loaded. Convert it: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors."
            )
        raise UserError(f"model.path={path}: {fault}")
    model_path.check(path)


def _jsonl(key: str, path: Path, method: str, all_lines: bool) -> None:
    check_is_file(key, path)
    alternatives = COLUMNS.get(method, ((),))
    place = ""
    for place, row in itertools.islice(json_rows(path), None if all_lines else PLAN_LINES):
        if not any(all(column in row for column in columns) for columns in alternatives):
            fields = " or ".join("+".join(columns) for columns in alternatives)
            needs = f"{key} of method={method} needs {fields}."
            if method == "tokenizer":
                needs = f"random weights make their tokenizer of {key}, which then needs {fields}. "
                needs += "Use: model.path=<a trained model>."
            raise UserError(f"{place}: has {', '.join(row) or 'no field'}; {needs}")
    if not place:
        raise UserError(f"{key}={path}: no rows; the data set is empty.")


def _rewards(config: Config) -> None:
    """Check that a dotted path is a name in a module that Python finds. None is imported."""
    for name in config.method.rewards:
        module, dot, function = name.rpartition(".")
        if not dot:
            continue
        bases = [Path(folder, *module.split(".")) for folder in (os.getcwd(), *sys.path)]
        files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
        source = next(filter(Path.is_file, files), None)
        key = f"method.rewards.{name}"
        if source is None:
            where = f"({os.getcwd()} and the installed packages)"
            raise UserError(f"{key}: no module {module!r} on the path {where}.")
        try:
            text = source.read_text(encoding="utf-8")
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{source}: no Python ({error}).") from error
        words = re.findall(r"\w+", text)
        if function not in words:
            raise UserError(f"{key}: {module} defines no {function!r}.{near(function, words)}")


def _packages(config: Config) -> None:
    """Check the packages of tracking, Liger and low precisions, in the image or in this Python."""
    tracker, key = tracking.package(config), f"tracking={config.tracking.name}"
    if tracker:
        _package(config, key, tracker, "tracking=tensorboard", "requirements.in")
    tracking.check_key(config, os.environ)
    if argument(config, "use_liger_kernel"):
        key = "method.args.use_liger_kernel"
        _package(config, f"{key}=true", "liger-kernel", f"{key}=false", "liger.in")
    if config.smoke:  # a CPU computes in fp32
        return
    precision = config.precision.name if config.method.uses_precision else "fp32"
    low = [(f"precision={precision}", precision, "precision=bf16")]
    for name in ("modes", "precisions") if config.method.measures_machine else ():
        modes = argument(config, name) or []
        plain = ",".join(mode for mode in modes if not mode.endswith(tuple(LOW_PRECISION)))
        key = f"method.args.{name}"
        # full_fp8 gives fp8; another check rejects a precision that the GPU does not have
        kinds = {mode: mode.rpartition("_")[2] for mode in modes}
        kinds = {mode: kind for mode, kind in kinds.items() if kind in config.hardware.precisions}
        low += [(f"{key}={mode}", kind, f"{key}=[{plain}]") for mode, kind in kinds.items()]
    for override, precision, instead in low:
        if precision in LOW_PRECISION:
            _package(config, override, LOW_PRECISION[precision], instead, "quantization.in")


def _package(config: Config, override: str, package: str, instead: str, source: str) -> None:
    if config.runtime.on_node == "docker":
        image = images.load().get(config.container.name)  # None for the user's own image
        locks = [(images.FOLDER / lock).read_text() for lock in image.locks] if image else []
        if image and not any(f"\n{package}==" in lock for lock in locks):
            holding = f"{package} in containers/cpu/{source} and among the image's locks, "
            holding += "then make lock and the image anew"
            raise UserError(
                f"{override}: the image {image.name} lacks {package}. Use: {instead}, "
                f"{runtime_as(config, 'local')}, or {holding}."
            )
        return
    module = MODULES.get(package, package.replace("-", "_"))
    if not config.runtime.slurm.python and importlib.util.find_spec(module) is None:
        low = package in LOW_PRECISION.values()
        install = "make quantization" if low else f"pip install {package}"
        raise UserError(
            f"{override}: the package {package} is not installed. Install it ({install}), or use "
            f"{instead}."
        )
