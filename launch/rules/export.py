"""Define rules about exports."""

from __future__ import annotations

import re

from launch.rules.rule import Rule
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Init, Network
from launch.schema.trainer_args import argument

IN_8_BITS = ("fp8", "int8")
# Names that huggingface_hub's validate_repo_id accepts, with an owner.
REPOSITORY = re.compile(
    r"(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?",
    re.ASCII,
)
TOKEN = "HF_TOKEN"


def exports(config: Config) -> bool:
    return config.method.exports


def _gguf(config: Config) -> bool:
    return "gguf" in (argument(config, "formats") or [])


EXPORT_RULES = [
    Rule(
        "export_model",
        # Under smoke=true a phase's model is filled in later. The rank rejects a missing one.
        lambda c: exports(c) and not c.model.path and c.model.init == Init.random and not c.smoke,
        lambda c: f"model={c.model.name} has random weights; there is nothing to export",
        "model.path=<run>, or model_from in a phase",
    ),
    Rule(
        "export_adapter",
        lambda c: exports(c) and c.adapter.name != "none" and not c.adapter.path,
        lambda c: f"adapter={c.adapter.name} with method=export needs a trained adapter",
        "adapter.path=<run>/adapter, or adapter=none",
    ),
    Rule(
        "export_gguf",
        lambda c: exports(c) and _gguf(c) != bool(argument(c, "gguf_converter")),
        "method.args.formats with gguf and method.args.gguf_converter need each other",
        "formats=[safetensors,gguf] gguf_converter=<llama.cpp>/convert_hf_to_gguf.py",
    ),
    Rule(
        "export_gguf_8_bits",
        lambda c: exports(c) and _gguf(c) and argument(c, "weights") in IN_8_BITS,
        lambda c: (
            f"method.args.weights={argument(c, 'weights')} with gguf: llama.cpp has other 8 bits"
        ),
        "method.args.weights=bf16, and llama-quantize on model.gguf; or formats=[safetensors]",
    ),
    Rule(
        "export_push_to",
        lambda c: (
            exports(c)
            and argument(c, "push_to") is not None
            and not REPOSITORY.fullmatch(str(argument(c, "push_to")))
        ),
        lambda c: f"method.args.push_to={argument(c, 'push_to')}: no repository of the hub",
        "method.args.push_to=<owner/name>",
    ),
    Rule(
        "export_push_container",
        lambda c: (
            exports(c)
            and bool(argument(c, "push_to"))
            and c.runtime.on_node == "docker"
            and (c.runtime.network == Network.none or TOKEN not in c.runtime.secrets)
        ),
        "method.args.push_to in a container without a network or a token",
        lambda c: (
            f"runtime.network=bridge and {TOKEN} among runtime.secrets; or {runtime_as(c, 'local')}"
        ),
    ),
]
