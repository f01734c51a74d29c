"""Check that a run's model, data, rewards, packages and run_root exist and can be used.

The checks raise UserError, and neither import the training stack nor run the user's code.
"""

import ast
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from containers import images
from launch.config.smoke import LOW_PRECISION
from launch.config.wording import HUB
from launch.core import row_formats
from launch.core.errors import UserError, near
from launch.inputs import model_path, tracking
from launch.inputs.adapter_files import check_adapter
from launch.inputs.jsonl_files import check_data_files, check_is_file
from launch.inputs.model_config import quantization_of
from launch.inputs.paths import LATEST
from launch.inputs.reading import near_files
from launch.inputs.reward_files import source_of
from launch.inputs.tuned_files import check_tuned_files
from launch.machine.detect import Host
from launch.plan import tuned
from launch.plan.check_rows import check_rows
from launch.plan.export_files import check_export, check_not_a_run
from launch.plan.rundir import runs_dir, runs_in
from launch.rules.optimizers import optimizer as optimizer_row
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Vendor
from launch.schema.trainer_args import value_or_none

# packages whose module has a different name
MODULES = {
    "azureml-core": "azureml",
    "torch-optimi": "optimi",
    "flash-attn-3": "flash_attn_interface",
    "optimum-quanto": "optimum.quanto",
    "amd-quark": "quark",
}
# quant_method in config.json -> packages with which transformers loads such weights
QUANTIZERS = {
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "auto-round": ("auto-round",),
    "torchao": ("torchao",),
    "hqq": ("hqq",),
    "aqlm": ("aqlm",),
    "vptq": ("vptq",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "eetq": ("kernels",),
}
# package -> target of the Makefile that installs it
MAKE_TARGETS = {**dict.fromkeys(LOW_PRECISION.values(), "quantization"), "gguf": "gguf"}
ATTENTION = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def check_files(config: Config, all_lines: bool, host: Host | None = None) -> list[str]:
    """Raise UserError for the first file or package that the run needs and cannot use.

    Without `all_lines`, check only the first PLAN_LINES lines of a data file. If the run's GPUs are
    not those of `host`, a missing package is returned as a warning.
    """
    config = tuned.recipe(config) or config  # a tuning run reads its recipe's files
    if config.method.rows is not None:
        row_formats.row_format(config.method.rows)
    _check_model(config, all_lines)
    check_adapter(config)
    check_export(config)
    _check_rewards(config)
    check_rows(config, all_lines)
    check_data_files(config)
    if config.method.starts_vllm and (dataset := config.method.args.get("dataset")):
        check_is_file("method.args.dataset", Path(dataset))
    check_tuned_files(config)
    _check_run_root(config)
    try:
        _check_packages(config)
    except UserError as error:
        vendor, is_local = config.hardware.vendor, config.runtime.on_node == "local"
        if host is None or not is_local or vendor == Vendor.none or host.gpus_of(vendor):
            raise
        return [f"On this machine, which is not the run's, {error}"]
    return []


def _check_run_root(config: Config) -> None:
    """Check that a run directory can be created. Permissions do not tell, for example in /proc."""
    folder = nearest = runs_dir(config)
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryDirectory(prefix=".writable-", dir=nearest).cleanup()
    except OSError as error:
        raise UserError(
            f"run_root={config.run_root}: no directory can be created in {nearest} "
            f"({error.strerror}). Use: run_root=<another directory>."
        ) from error


def _check_model(config: Config, all_lines: bool) -> None:
    path = config.model.path and Path(config.model.path)
    if not path:
        return
    check_not_a_run(path)
    if not path.is_dir():
        name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        is_hub_id = not name.is_absolute() and len(name.parts) == 2 and not path.parent.is_dir()
        hint = HUB.format(name) if is_hub_id else ""
        if path.name == LATEST:  # of a run that has not started
            hint = " To plan before that run, use the model that it starts from: model=<name>."
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
    model_path.check(config, path, all_lines)


def _check_rewards(config: Config) -> None:
    """Check that each dotted reward is a name in a module that Python finds; import nothing."""
    for name in config.method.rewards:
        module, dot, function = name.rpartition(".")
        if not dot:
            continue
        source, key = source_of(module, config), f"method.rewards.{name}"
        if source is None:
            in_container = config.runtime.on_node != "local"
            shell = "; containers do not have the shell's PYTHONPATH" * in_container
            raise UserError(
                f"{key}: no module {module!r} in {os.getcwd()}, user_env.PYTHONPATH or the "
                f"installed packages{shell}. Use: user_env.PYTHONPATH=<directory that contains "
                f"{module.partition('.')[0]}>."
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
    """Check that the image or this Python has the packages that the composition names."""
    tracker, key = tracking.package(config), f"tracking={config.tracking.name}"
    if tracker:
        _check_package(config, key, tracker, "tracking=tensorboard", "requirements.in")
    tracking.check_key(config, os.environ)
    if value_or_none(config, "use_liger_kernel"):
        key = "method.args.use_liger_kernel"
        _check_package(config, f"{key}=true", "liger-kernel", f"{key}=false", "liger.in")
    if "gguf" in (value_or_none(config, "formats") or ()):
        remedy = "method.args.formats=[safetensors]"
        _check_package(config, "method.args.formats=[gguf]", "gguf", remedy, "gguf.in")
    if config.smoke:  # a CPU computes in fp32
        return
    optimizer = value_or_none(config, "optim") or ""
    if config.method.trains and (package := optimizer_row(optimizer).get("package")):
        key = "method.args.optim"
        _check_package(
            config, f"{key}={optimizer}", package, f"{key}=adamw_torch", "quantization.in"
        )
    # The locks do not list the packages of an image's base.
    if config.runtime.on_node == "local" and config.method.uses_model:
        keys = {"packed_attention": "varlen"}
        if importlib.util.find_spec("kernels") is None:  # with it, transformers downloads kernels
            keys["attention"] = "sdpa"
        for key, remedy in keys.items():
            if package := ATTENTION.get(kernel := getattr(config.hardware, key)):
                override, remedy = f"hardware.{key}={kernel}", f"hardware.{key}={remedy}"
                _check_package(config, override, package, remedy, "")
        key = f"model.path={config.model.path}"
        if package := _tokenizer_package(config.model.path):
            override = f"{key} without tokenizer.json"
            _check_package(config, override, package, "model.path=<a directory with one>", "")
        quantizer = _quantizer(config) or ""
        for package in QUANTIZERS.get(quantizer, ()):
            remedy = "model.path=<the same model in 16 bits>"
            _check_package(config, f"{key} with {quantizer} weights", package, remedy, "")
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


def _tokenizer_package(path: str | None) -> str | None:
    """Return the package that converts a directory's tokenizer; None if none is needed."""
    file = Path(path or "") / "tokenizer.model"
    if path is None or not file.is_file() or (file.parent / "tokenizer.json").is_file():
        return None
    with file.open("rb") as content:  # protobuf, or Base64 in lines
        return "sentencepiece" if content.read(1) == b"\n" else "tiktoken"


def _quantizer(config: Config) -> str | None:
    """Return the method that has quantized the weights of model.path, if transformers loads them.

    vLLM has its own kernels, and an export reads the files itself.
    """
    method = config.method
    if method.exports or method.kind == "service" or method.starts_vllm:
        return None
    return None if value_or_none(config, "engine") == "vllm" else quantization_of(config.model)


def _check_package(
    config: Config, override: str, package: str, remedy: str, requirements: str
) -> None:
    """Check that the image or this Python has the package that `override` needs.

    `remedy` is an override that does not need it, and `requirements` a file in containers/cpu.
    """
    if config.runtime.on_node != "local":
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
    parent = module.partition(".")[0]  # find_spec imports it
    if not config.runtime.slurm.python and not (
        importlib.util.find_spec(parent) and importlib.util.find_spec(module)
    ):
        target = MAKE_TARGETS.get(package)
        install = f"make {target}" if target else f"pip install {package}"
        raise UserError(
            f"{override}: the package {package} is not installed. Use: {install}, or {remedy}."
        )
