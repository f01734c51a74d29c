"""Checks that need the file system or the installed packages: the model's directory, the data, rewards, tracking, Liger, run_root.

Each raises UserError with one message. Nothing here imports the training stack or runs a user's code.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from containers import images
from launch import tuned
from launch.command_line.wording import HUB
from launch.environment import ROOT
from launch.errors import UserError, near
from launch.files import model_path, tracking
from launch.files.adapter_files import check_adapter
from launch.files.data_files import check_data_files, check_is_file
from launch.files.export_files import check_export, check_not_a_run
from launch.files.rundir import runs_in
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Init
from launch.smoke import LOW_PRECISION
from launch.trainer_args import argument

PLAN_LINES = 10_000  # of a data file that mode=plan reads; a run reads all
MODULES = {"azureml-core": "azureml"}  # of packages that are imported by another name
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# Columns of TRL's data set formats; a file's rows need every column of one of the alternatives.
COLUMNS = {
    "sft": (("messages",), ("text",), ("prompt", "completion")),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "grpo": (("prompt",),),
    "sample": (("prompt",),),
    "evaluate": (("prompt", "answer"),),
}
COLUMNS["tokenizer"] = COLUMNS["sft"]


def check_files(config: Config, all_lines: bool) -> None:
    config = tuned.recipe(config) or config  # it is the recipe of a tuning that reads them
    _model(config)
    check_adapter(config)
    check_export(config)
    if config.data.kind == "jsonl":
        if config.data.path is not None:
            _jsonl("data.path", Path(config.data.path), _read_as(config), all_lines)
        if config.data.heldout_path is not None:
            reader = config.method.name if config.method.selection.metric else "evaluate"
            _jsonl("data.heldout_path", Path(config.data.heldout_path), reader, all_lines)
    check_data_files(config)
    _tuned_products(config)
    _rewards(config)
    _program(config)
    _packages(config)
    _run_root(Path(config.run_root))


def _read_as(config: Config) -> str:
    """The method whose fields data.path must have. An evaluation reads its own part of it, or makes a tokenizer of it, or neither."""
    if config.method.name != "evaluate":
        return config.method.name
    makes_tokenizer = config.model.path is None and config.model.init == Init.random
    return "evaluate" if config.data.heldout_fraction else "tokenizer" if makes_tokenizer else "nothing"


def _tuned_products(config: Config) -> None:
    """TunableOp goes on without a word where its file is missing. It looks for one with the GPU's number before the point."""
    given = config.user_env.get("PYTORCH_TUNABLEOP_FILENAME")
    if given is None or config.user_env.get("PYTORCH_TUNABLEOP_TUNING") != "0":
        return
    first = Path(given.replace("%d", "0") if "%d" in given else re.sub(r"(\.[^.]*)?$", r"0\1", given, count=1))
    if not Path(given).is_absolute() or not first.is_file():
        raise UserError(
            f"user_env.PYTORCH_TUNABLEOP_FILENAME={given}: there is no {first}. Use: the whole path that method=tune/tunableop printed."
        )


def _of_the_hub(path: Path) -> str:
    """What to write for a model of the hub: a path of two names, whose first is no directory here, is often meant so."""
    named = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if named.is_absolute() or len(named.parts) != 2 or path.parent.is_dir():
        return ""
    return HUB.format(named)


def _model(config: Config) -> None:
    path = config.model.path and Path(config.model.path)
    if not path:
        return
    check_not_a_run(path)
    if path.is_file():
        raise UserError(f"model.path={path}: a file, and a directory is needed; python -m recipes.from_gguf makes one of a GGUF file.")
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"model.path={path}: no such directory.{near(path.name, siblings)}{_of_the_hub(path)}")
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path={path}: no config.json; a model directory holds config.json, *.safetensors and a tokenizer.{runs_in(path)}"
        )
    if not list(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
        if pickles:
            raise UserError(
                f"model.path={path}: only a pickle checkpoint ({pickles[0]}), which can run any code when it is loaded. "
                "Convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors."
            )
        raise UserError(f"model.path={path}: no *.safetensors; weights are needed.")
    model_path.check(path)
    model_path.check_config(path)


def _jsonl(key: str, path: Path, method: str, all_lines: bool) -> None:
    check_is_file(key, path)
    alternatives = COLUMNS.get(method, ((),))
    rows = 0
    for number, row in _lines(path):
        if rows >= PLAN_LINES and not all_lines:
            break
        rows += 1
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__}, and every line is one JSON object.")
        if not any(all(column in row for column in columns) for columns in alternatives):
            wanted = " or ".join("+".join(columns) for columns in alternatives)
            needs = f"{key} of method={method} needs {wanted}."
            if method == "tokenizer":
                needs = f"random weights make their tokenizer of {key}, which needs {wanted} then. Use: model.path=<a trained model>."
            raise UserError(f"{path}:{number}: has {', '.join(row) or 'no field'}; {needs}")
    if rows == 0:
        raise UserError(f"{key}={path}: no rows; the data set is empty.")


def _lines(path: Path) -> Iterator[tuple[int, object]]:
    """(line number, parsed row) of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # a byte order mark is no part of the first row
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except json.JSONDecodeError as error:
                        raise UserError(f"{path}:{number}: no JSON ({error.msg} at column {error.colno}).") from error
                    except ValueError as error:  # Python converts no more digits, for safety
                        most = sys.get_int_max_str_digits()
                        raise UserError(f"{path}:{number}: has a number of more than {most} digits. Write it as text.") from error
                    except RecursionError as error:
                        raise UserError(f"{path}:{number}: nested too deep to be read. Every line must be one row.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def _rewards(config: Config) -> None:
    """A dotted path must name a function in a module that Python finds; the module is parsed, not run."""
    for name in config.method.rewards:
        if "." in name:
            module, function = name.rsplit(".", 1)
            source = _module_source(module)
            if source is None:
                raise UserError(f"method.rewards.{name}: no module {module!r} on the path ({os.getcwd()} and the installed packages).")
            names = _defined(source)
            if function not in names:
                raise UserError(f"method.rewards.{name}: {module} defines no {function!r}.{near(function, names)}")


def _module_source(module: str) -> Path | None:
    """The file of a module, found without importing its packages."""
    parts = module.split(".")
    for folder in [os.getcwd(), *sys.path]:
        base = Path(folder, *parts)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _defined(source: Path) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    try:
        body = ast.parse(source.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: no Python ({error}).") from error
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _program(config: Config) -> None:
    """It must be a module of recipes/ that runs by itself."""
    given, programs = config.method.program, _programs()
    if given not in programs:
        raise UserError(f"method.program={given}: no program of recipes/.{near(given, programs)} Use: method=, which names its own.")


@functools.cache
def _programs() -> list[str]:
    files = [file for file in sorted((ROOT / "recipes").rglob("*.py")) if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


def _packages(config: Config) -> None:
    """What tracking, Liger and low precisions need beside the training stack, in the image or in this Python."""
    tracker = tracking.package(config)
    if tracker:
        _package(config, f"tracking={config.tracking.name}", tracker, "tracking=tensorboard", "requirements.in")
    tracking.check_key(config, os.environ)
    if argument(config, "use_liger_kernel"):
        _package(config, "method.args.use_liger_kernel=true", "liger-kernel", "method.args.use_liger_kernel=false", "liger.in")
    if not config.smoke:  # a CPU computes in fp32
        for given, precision, instead in _low_precisions(config):
            _package(config, given, LOW_PRECISION[precision], instead, "quantization.in")


def _low_precisions(config: Config) -> Iterator[tuple[str, str, str]]:
    """(what was given, fp8 or nf4, what to use instead) for each that this composition computes in."""
    if config.method.uses_precision and config.precision.name in LOW_PRECISION:
        yield f"precision={config.precision.name}", config.precision.name, "precision=bf16"
    for name in ("modes", "precisions") if config.method.kind == "bench" else ():
        given = argument(config, name) or []
        plain = [one for one in given if not one.endswith(tuple(LOW_PRECISION))]
        for one in given:
            precision = one.rpartition("_")[2]  # full_fp8
            if precision in LOW_PRECISION and precision in config.hardware.precisions:  # else its row says that the GPU lacks it
                yield f"method.args.{name}={one}", precision, f"method.args.{name}=[{','.join(plain)}]"


def _package(config: Config, given: str, package: str, instead: str, source: str) -> None:
    if config.runtime.on_node == "docker":
        image = images.load().get(config.container.name)  # what an image of the user's own holds is not known
        if image and not any(f"\n{package}==" in (images.FOLDER / lock).read_text(encoding="utf-8") for lock in image.locks):
            holding = f"{package} in containers/cpu/{source} and among the image's locks, then make lock and the image anew"
            raise UserError(
                f"{given}: the image {image.name} holds no {package}. Use: {instead}, {runtime_as(config, 'local')}, or {holding}."
            )
    elif not config.runtime.slurm.python and importlib.util.find_spec(MODULES.get(package, package.replace("-", "_"))) is None:
        install = "make quantization" if package in LOW_PRECISION.values() else f"pip install {package}"
        raise UserError(f"{given}: the package {package} is not installed. Install it ({install}), or use {instead}.")


def _run_root(root: Path) -> None:
    """The directory, or the nearest parent that exists, must be one we may write to."""
    nearest = root.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UserError(f"run_root={root}: {nearest} is a file. Name a directory.")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"run_root={root}: {nearest} is not writable by you. Choose another by run_root=<directory>.")
