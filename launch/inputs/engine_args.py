"""Check topology.server_args against the locked vLLM's (containers/lock_trainer_args.py)."""

from __future__ import annotations

from launch.core.errors import UserError
from launch.core.near_names import argument_hint
from launch.schema import Config, shapes
from launch.schema.trainer_args import NOT_SETTABLE, check_value, lock

KEY = "topology.server_args"
SERVER = {"api_server_count": {"types": ["int"], "least": 1}}  # of a split's server, not its engine


def check(config: Config) -> None:
    """Raise UserError for an argument or value that vLLM rejects, or that another key sets."""
    engine, colocate = lock()["engine"], config.topology.name == "colocate"
    if config.topology.servers:
        engine = {**engine, **SERVER}
    owned = NOT_SETTABLE[KEY] | (NOT_SETTABLE["colocate"] if colocate else {})
    problems = {name: f"another key sets it. Use: {key}." for name, key in owned.items()}
    problems |= {name: f"{reason}. Leave it out." for name, reason in NOT_SETTABLE["fixed"].items()}
    for name, value in config.topology.server_args.items():
        problem = problems.get(name)
        if problem is None and name not in engine:
            bench = lock()["arguments"]["recipes.bench.vllm_engine.EngineConfig"]
            refusal = bench["base"]["refused"].get(name, "")
            hint = argument_hint(name, {*engine} - {*problems})
            hint = f" Use: user_env.{name}=<value>." if name.isupper() else hint
            problem = f"the engine of vLLM {lock()['vllm']} has no such argument.{hint}"
            problem = f"{name} {refusal}" if refusal.startswith("was removed") else problem
        if problem:
            raise UserError(f"{KEY}.{name}={value}: {problem}")
        if value is not None:  # null removes an argument that a file sets
            check_value(f"{KEY}.{name}", value, engine[name], "vLLM")


def weights_gb(config: Config, width: float) -> float:
    """Return the GB of the weights: `width` bytes each, or 1 for linear layers as fp8."""
    saved = 0.0
    if config.topology.server_args.get("quantization") == "fp8":
        saved = (width - 1) * config.model.num_layers * shapes.linear_parameters(config.model)
    return (width * config.model.num_parameters - saved) / 1e9


def cache_width(config: Config, width: float) -> float:
    """Return the bytes per element of the engine's cache: 1 if it is fp8, else `width`."""
    dtype = str(config.topology.server_args.get("kv_cache_dtype"))
    return 1.0 if dtype.startswith("fp8") else width
