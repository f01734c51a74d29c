"""Check the arguments of a method's configuration class, and add those that other groups imply."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from launch.core.errors import UserError, near
from launch.core.json_files import yaml_file
from launch.core.near_names import argument_hint, word_hint
from launch.core.near_names import names as near_names
from launch.schema import Config
from launch.schema.enums import Vendor

LOCK = Path(__file__).parents[2] / "containers/trainer_args.lock.json"
METHODS = Path(__file__).parents[2] / "conf/method"
NOT_SETTABLE: dict[str, dict[str, str]] = yaml_file(Path(__file__).with_name("owned_args.yaml"))
OWNED = NOT_SETTABLE["method.args"]

# With compiled layers, pad batches to a multiple of this many tokens. Kernels are faster if lengths
# have known divisors, with fp8 by a tenth.
COMPILED_MULTIPLE = 64
JSON_TYPES: dict[type, str] = {
    **{kind: kind.__name__ for kind in (bool, int, float, str, list, dict)},
    type(None): "null",
}


@functools.cache
def lock() -> dict[str, Any]:
    """Return the arguments of all configuration classes, as `make lock` recorded them."""
    content: dict[str, Any] = json.loads(LOCK.read_text())
    return content


def class_arguments(config: Config) -> dict[str, dict[str, Any]]:
    """Return the arguments of the method's configuration class: name -> {types, default, ...}."""
    return _locked_arguments(config.method.config_class)


def class_of(config: Config) -> str:
    """Return the configuration class of the method or, for method=tune/..., of its recipe."""
    name = recipe_name(config)
    return _class_of_method(name) if name else config.method.config_class


def known(config: Config) -> dict[str, dict[str, Any]]:
    """Return the arguments of the method and, for method=tune/..., of its recipe."""
    name, arguments = recipe_name(config), class_arguments(config)
    return {**_locked_arguments(_class_of_method(name)), **arguments} if name else arguments


def recipe_name(config: Config) -> str | None:
    """Return the method that a tuning run uses in its trials; None for any other method."""
    if not config.method.tunes:
        return None
    default = class_arguments(config).get("recipe", {}).get("default")
    return str(config.method.args.get("recipe", default))


@functools.cache
def _locked_arguments(config_class: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of a class from the lock. Raises UserError."""
    arguments: dict[str, dict[str, Any]] = lock()["arguments"].get(config_class, {})
    if not arguments:
        raise UserError(
            f"method.config_class={config_class}: not in {LOCK.name}. After adding a method, run "
            "`python containers/lock_trainer_args.py`."
        )
    return arguments


@functools.cache
def _class_of_method(name: str) -> str:
    """Return the configuration class of a recipe. Raises UserError if it is unknown or tunes."""
    names = sorted(
        str(file.relative_to(METHODS).with_suffix("")) for file in METHODS.rglob("*.yaml")
    )
    names = [other for other in names if not other.startswith("tune/")]
    if name not in names:
        raise UserError(
            f"method.args.recipe={name}: no such recipe.{near(name, names)} Recipes: "
            f"{', '.join(names)}."
        )
    return str(yaml_file(METHODS / f"{name}.yaml")["config_class"])


def value(config: Config, name: str) -> Any:
    """Return an argument's value in the composition, or its default."""
    return config.method.args.get(name, known(config)[name]["default"])


def value_or_none(config: Config, name: str) -> Any:
    """Return an argument's value; None if the method has no such argument."""
    arguments = known(config)
    return config.method.args.get(name, arguments[name]["default"]) if name in arguments else None


def check(config: Config) -> None:
    """Raise UserError for unknown arguments, wrong values, and arguments that another key sets."""
    arguments, cls = known(config), config.method.config_class
    for name, argument in config.method.args.items():
        key, problem = f"method.args.{name}={argument}", ""
        if name in OWNED and name in arguments:
            problem = f"cannot be set under method.args. Use: {OWNED[name]}."
        elif name not in arguments:
            removed = NOT_SETTABLE["removed"].get(name)
            hint = f" TRL removed it: {removed}." if removed else ""
            trainers = (names for cls, names in lock()["arguments"].items() if cls[:4] == "trl.")
            settable = set(arguments) - set(OWNED)
            if near_names("arguments").get(name) in settable:
                hint = argument_hint(name, settable)
            elif not config.method.trains and any(name in names for names in trainers):
                hint = (
                    f" It belongs to training. Use: method={config.method.name} "
                    "model.path=<the run that trained the model>, without it."
                )
            hint = hint or argument_hint(name, settable, argument)
            owner = cls if cls.startswith("recipes.") else f"{cls} of TRL {lock()['trl']}"
            problem = f"{owner} has no such argument.{hint}"
        elif name == "num_generations" and argument is None:  # TRL's type allows it
            problem = f"GRPO needs a group size. Use: method.args.{name}=8."
        if problem:
            raise UserError(f"{key}: {problem}".replace("=None:", "=null:"))
        check_value(f"method.args.{name}", argument, arguments[name], cls)
        owned = NOT_SETTABLE.get(f"method.args.{name}", {})
        for inner in owned if isinstance(argument, dict) else ():
            if inner in argument:
                raise UserError(
                    f"method.args.{name}.{inner}={argument[inner]}: another key sets it. "
                    f"Use: {owned[inner]}."
                )


def check_value(key: str, argument: Any, allowed: dict[str, Any], owner: str) -> None:
    """Raise UserError if the lock's entry `allowed` rejects the value.

    `owner` is the class that has the argument.
    """
    names, rejected, items = allowed.get("names"), allowed.get("refused", {}), allowed.get("items")
    options = f" Use one of {', '.join(names)}." if names else ""
    if not _has_type(argument, allowed["types"]):
        types = " or ".join(allowed["types"])
        is_item = isinstance(argument, (str, int, float)) and (not names or argument in names)
        if "list" in allowed["types"] and is_item and _has_type(argument, items or ["any"]):
            options = f" Use: '{key}=[{argument}]'."
        kind = JSON_TYPES[type(argument)]
        problem = f"this is {kind}, but {owner} accepts {types}.{options}"
        raise UserError(f"{key}={argument!r}: {problem}")
    for value in argument if isinstance(argument, list) else [argument]:
        if isinstance(argument, list) and items and not _has_type(value, items):
            kind = JSON_TYPES[type(value)]
            problem = f"contains {kind}, but entries must be {' or '.join(items)}."
            raise UserError(f"{key}={argument}: {problem}")
        if type(value) is int and value < allowed.get("least", value):
            raise UserError(f"{key}={argument}: must be at least {allowed['least']}.")
        for word in map(str, value if isinstance(value, dict) else [value]):
            if word in rejected:
                raise UserError(f"{key}: {word} {rejected[word]}")
            if names and value is not None and word not in names:
                hint = word_hint(key.rpartition(".")[2], word, names)
                raise UserError(f"{key}={word}: unknown.{hint}{options}")
        for word, inner in value.items() if isinstance(value, dict) else ():
            _check_key(f"{key}.{word}", word, inner, allowed)


def _check_key(key: str, word: str, value: Any, allowed: dict[str, Any]) -> None:
    """Raise UserError for a wrong key of a mapping, or for its value, which may be a list."""
    prefixes, ours = allowed.get("prefixes"), allowed.get("engine_keys")
    if prefixes and not word.startswith(tuple(prefixes)):
        raise UserError(f"{key}: a variable must start with one of {', '.join(prefixes)}.")
    if ours is None or word in ours or word.isupper():  # upper case: an environment variable
        return
    engine = lock()["engine"]
    if word not in engine:
        owner, hint = f"the engine of vLLM {lock()['vllm']}", argument_hint(word, engine)
        raise UserError(f"{key}: {owner} has no such argument.{hint}")
    is_space = "list" not in engine[word]["types"] and isinstance(value, list)
    for item in value if is_space else [value]:
        if item is not None:
            check_value(key, item, engine[word], "vLLM")


def _has_type(argument: Any, types: list[str]) -> bool:
    """Return whether the value has one of the types. An int is also a float."""
    kind = JSON_TYPES[type(argument)]
    return "any" in types or kind in types or (kind == "int" and "float" in types)


def complete(
    config: Config, run_dir: Path, ports: tuple[int, int], server: str = "127.0.0.1"
) -> dict[str, Any]:
    """Return all keyword arguments of the configuration class.

    They are method.args and those that the rest of the composition implies. `ports` are the ports
    of the server, whose address is `server`, and of its weight transfer.
    """
    implied = {
        "output_dir": str(run_dir / "checkpoints"),
        "seed": config.seed,
        "data_seed": config.seed,
        # With use_cpu, accelerate replaces sharding with DDP, so recipes/smoke selects the CPU for
        # sharded ranks.
        "use_cpu": config.hardware.vendor == Vendor.none
        and config.topology.strategy in ("none", "ddp"),
        "bf16": config.precision.compute in ("bf16", "fp8"),
        "fp16": config.precision.compute == "fp16",
        "report_to": config.tracking.name,
        "run_name": config.name,
        "project": config.tracking.project or "huggingface",
        "disable_tqdm": True,
        # The filter would log a NaN loss as 0.0. recipes/measure/metrics.py stops the run instead.
        "logging_nan_inf_filter": False,
        "pad_to_multiple_of": COMPILED_MULTIPLE if config.step.compile else "auto",
        "dataloader_num_workers": config.hardware.dataloader.num_workers,
        "dataloader_pin_memory": config.hardware.dataloader.pin_memory,
        **_strategy(config),
        **_generation(config, ports, server),
        **_selection(config),
    }
    # For method=tune/..., these exclude the arguments of its recipe.
    names = class_arguments(config)
    return {k: v for k, v in {**implied, **config.method.args}.items() if k in names}


def _strategy(config: Config) -> dict[str, Any]:
    topology = config.topology
    if topology.strategy == "fsdp":
        fsdp = dataclasses.asdict(topology.fsdp)
        del fsdp["reduce_dtype"]  # not an argument of accelerate
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, **fsdp},
            # Clipping reduces offloaded gradients on the host, which RCCL does not support.
            **(
                {"ddp_backend": "cuda:nccl,cpu:gloo"}
                if topology.fsdp.cpu_offload and config.hardware.vendor != Vendor.none
                else {}
            ),
        }
    if topology.strategy in ("zero2", "zero3"):
        return {"deepspeed": _deepspeed(config)}
    # Every trained weight contributes to every loss, so a search for unused weights in each step
    # would only cost time and print a warning. A single rank is included, because accelerate wraps
    # its model too if it has a strategy.
    return {"ddp_find_unused_parameters": False}


def _selection(config: Config) -> dict[str, Any]:
    """Return the arguments that evaluate every saved model, so that the best can be loaded."""
    metric = config.method.selection.metric
    if metric is None:
        return {}
    return {
        "eval_on_start": evaluates_first(config),
        "eval_strategy": "steps",
        "eval_steps": value(config, "eval_steps") or value(config, "save_steps"),
        "metric_for_best_model": metric,
        "greater_is_better": config.method.held_out_metrics[metric],
        "per_device_eval_batch_size": eval_batch_size(config),
        "num_generations_eval": 1,  # grpo: only training needs a group
    }


def evaluates_first(config: Config) -> bool:
    """Return whether held-out rows are measured before the first step, too.

    A pass costs a third of training on these rows. Generating answers to them costs much more.
    """
    return not config.method.generates


def eval_batch_size(config: Config) -> int:
    """Return the held-out rows of a rank's batch, which metrics depend on.

    It is as composed, whatever speed=auto chose, but no larger than a micro-batch that fits.
    """
    if size := config.method.args.get("per_device_eval_batch_size"):
        return int(size)
    train = "per_device_train_batch_size"
    composed = [c.before for c in config.chosen if c.key == f"method.args.{train}" and c.before]
    return min(map(int, [value(config, train), *composed]))


def _deepspeed(config: Config) -> dict[str, Any]:
    """Return DeepSpeed's configuration. transformers fills in `auto` from the arguments."""
    stage = int(config.topology.strategy[-1])
    # With overlap, stage 2 reduces gradients on another stream, which has read freed buffers
    # (DeepSpeed#5294, #7965). Four H200s were no slower without it (docs/results/topologies.md).
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": stage == 3,
        "contiguous_gradients": True,
    }
    to_host = {"device": "cpu", "pin_memory": config.hardware.dataloader.pin_memory}
    if config.topology.zero.offload_optimizer:
        zero["offload_optimizer"] = dict(to_host)
    if config.topology.zero.offload_parameters:
        zero["offload_param"] = dict(to_host)
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    content: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if config.hardware.vendor == Vendor.none:
        # DeepSpeed compiles its own optimizer for offload, but the cpu image has no compiler.
        content["zero_force_ds_cpu_optimizer"] = False
    if config.hardware.vendor == Vendor.amd:
        # Reducing bf16 gradients in bf16 silently gives NaN on ROCm (huggingface/accelerate#4025).
        content["communication_data_type"] = "fp32"
    return content


def _generation(config: Config, ports: tuple[int, int], server: str) -> dict[str, Any]:
    if config.topology.name == "colocate":
        return {"use_vllm": True, "vllm_mode": "colocate"}
    if config.topology.servers == 0:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://{server}:{ports[0]}",
        "vllm_group_port": ports[1],
        # TRL's default drops a completion if the product of its token ratios exceeds 3. That suits
        # rounding errors, but would drop most completions of older weights.
        **({"vllm_importance_sampling_mode": "token_truncate"} if config.topology.overlap else {}),
    }
