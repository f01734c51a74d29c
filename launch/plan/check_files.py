"""Check that a run's model, data, rewards, packages and run_root exist and can be used.

The checks raise UserError, and neither import the training stack nor run the user's code.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path

from containers import images
from launch.config.smoke import LOW_PRECISION
from launch.config.wording import HUB
from launch.core import row_formats
from launch.core.errors import UserError, near
from launch.inputs import model_path, tracking
from launch.inputs.adapter_files import check_adapter
from launch.inputs.jsonl_files import check_data_files
from launch.inputs.reading import near_files
from launch.plan import tuned
from launch.plan.check_rows import check_rows
from launch.plan.export_files import check_export, check_not_a_run
from launch.plan.rundir import runs_in
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.trainer_args import value_or_none

MODULES = {"azureml-core": "azureml"}  # packages whose module has a different name
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def check_files(config: Config, all_lines: bool) -> None:
    """Raise UserError for the first file or package that the run needs and cannot use.

    Without `all_lines`, check only the first PLAN_LINES lines of a data file.
    """
    config = tuned.recipe(config) or config  # a tuning run reads its recipe's files
    if config.method.rows is not None:
        row_formats.row_format(config.method.rows)
    _check_model(config)
    check_adapter(config)
    check_export(config)
    check_rows(config, all_lines)
    check_data_files(config)
    _check_tunableop_file(config)
    _check_rewards(config)
    _check_packages(config)
    root = Path(config.run_root)
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(
            f"run_root={root}: {nearest} is not a directory that you may write to. Use: "
            "run_root=<another directory>."
        )


def _check_tunableop_file(config: Config) -> None:
    """Check that TunableOp's file exists, because PyTorch silently runs untuned without it."""
    name = config.user_env.get("PYTORCH_TUNABLEOP_FILENAME")
    if name is None or config.user_env.get("PYTORCH_TUNABLEOP_TUNING") != "0":
        return
    # PyTorch replaces %d by the GPU's number, or inserts the number before the suffix.
    numbered = re.sub(r"(\.[^.]*)?$", r"0\1", name, count=1)
    file = Path(name.replace("%d", "0") if "%d" in name else numbered)
    if not Path(name).is_absolute() or not file.is_file():
        raise UserError(
            f"user_env.PYTORCH_TUNABLEOP_FILENAME={name}: {file} does not exist or is a relative "
            "path. Use: the absolute path that method=tune/tunableop printed."
        )


def _check_model(config: Config) -> None:
    path = config.model.path and Path(config.model.path)
    if not path:
        return
    check_not_a_run(path)
    if not path.is_dir():
        name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        is_hub_id = not name.is_absolute() and len(name.parts) == 2 and not path.parent.is_dir()
        hint = HUB.format(name) if is_hub_id else ""
        problem = f"no such directory.{near_files(path)}{hint}"
        if path.is_file():
            problem = "a file, not a directory. To convert GGUF, use: python -m recipes.from_gguf."
        raise UserError(f"model.path={path}: {problem}")
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path={path}: no config.json. A model directory has config.json, "
            f"*.safetensors and a tokenizer.{runs_in(path)}"
        )
    if not list(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
        problem = "no *.safetensors, so there are no weights. Use: model.path=<a complete model>."
        if pickles:
            problem = (
                f"only a pickle checkpoint ({pickles[0]}), which can run any code when it is "
                "loaded. To convert it to safetensors, use: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
            )
        raise UserError(f"model.path={path}: {problem}")
    model_path.check(path)


def _check_rewards(config: Config) -> None:
    """Check that each dotted reward is a name in a module that Python finds; import nothing."""
    for name in config.method.rewards:
        module, dot, function = name.rpartition(".")
        if not dot:
            continue
        bases = [Path(folder, *module.split(".")) for folder in (os.getcwd(), *sys.path)]
        files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
        source = next(filter(Path.is_file, files), None)
        key = f"method.rewards.{name}"
        if source is None:
            raise UserError(
                f"{key}: there is no module {module!r} in {os.getcwd()} or the installed packages."
            )
        try:
            text = source.read_text(encoding="utf-8")
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{key}: {source} is not valid Python ({error}).") from error
        words = re.findall(r"\w+", text)
        if function not in words:
            raise UserError(f"{key}: {module} defines no {function!r}.{near(function, words)}")


def _check_packages(config: Config) -> None:
    """Check that the image or this Python has the packages for tracker, Liger and low precision."""
    tracker, key = tracking.package(config), f"tracking={config.tracking.name}"
    if tracker:
        _check_package(config, key, tracker, "tracking=tensorboard", "requirements.in")
    tracking.check_key(config, os.environ)
    if value_or_none(config, "use_liger_kernel"):
        key = "method.args.use_liger_kernel"
        _check_package(config, f"{key}=true", "liger-kernel", f"{key}=false", "liger.in")
    if config.smoke:  # a CPU computes in fp32
        return
    precision = config.precision.name if config.method.uses_precision else "fp32"
    settings = [(f"precision={precision}", precision, "precision=bf16")]
    for name in ("modes", "precisions") if config.method.measures_machine else ():
        modes = value_or_none(config, name) or []
        others = ",".join(mode for mode in modes if not mode.endswith(tuple(LOW_PRECISION)))
        key = f"method.args.{name}"
        for mode in modes:
            precision = mode.rpartition("_")[2]  # full_fp8 computes in fp8
            if precision in config.hardware.precisions:  # another check rejects the other values
                settings.append((f"{key}={mode}", precision, f"{key}=[{others}]"))
    for override, precision, remedy in settings:
        if precision in LOW_PRECISION:
            _check_package(config, override, LOW_PRECISION[precision], remedy, "quantization.in")


def _check_package(
    config: Config, override: str, package: str, remedy: str, requirements: str
) -> None:
    """Check that the image or this Python has the package that `override` needs.

    `remedy` is an override that does not need it, and `requirements` a file in containers/cpu.
    """
    if config.runtime.on_node == "docker":
        image = images.load().get(config.container.name)  # None for the user's own image
        locks = [(images.FOLDER / lock).read_text() for lock in image.locks] if image else []
        if image and not any(f"\n{package}==" in lock for lock in locks):
            raise UserError(
                f"{override}: the image {image.name} does not contain {package}. Use: {remedy}, or "
                f"{runtime_as(config, 'local')}. To add it, put it in containers/cpu/"
                f"{requirements}, run make lock and rebuild the image with that lock."
            )
        return
    module = MODULES.get(package, package.replace("-", "_"))
    if not config.runtime.slurm.python and importlib.util.find_spec(module) is None:
        is_low_precision = package in LOW_PRECISION.values()
        install = "make quantization" if is_low_precision else f"pip install {package}"
        raise UserError(
            f"{override}: the package {package} is not installed. Use: {install}, or {remedy}."
        )
