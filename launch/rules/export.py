"""Rows of check.py's table about exports."""

from __future__ import annotations

import re

from launch.rules.rule import Rule
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Init, Network
from launch.trainer_args import argument

IN_8_BITS = ("fp8", "int8")
# As huggingface_hub's validate_repo_id takes them, with an owner.
REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
LICENSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
TOKEN = "HF_TOKEN"


def exports(config: Config) -> bool:
    return config.method.kind == "exporter"


def _gguf(config: Config) -> bool:
    return "gguf" in (argument(config, "formats") or [])


EXPORT_RULES = [
    Rule(
        "export_model",
        # Under smoke=true a phase's model is filled in later; the rank refuses what is left.
        lambda c: exports(c) and not c.model.path and c.model.init == Init.random and not c.smoke,
        lambda c: f"method=export of model={c.model.name}: its weights are random, and nobody has trained them",
        lambda c: "model.path=<run>, or model_from in a phase",
    ),
    Rule(
        "export_adapter",
        lambda c: exports(c) and c.adapter.name != "none" and not c.adapter.path,
        lambda c: f"adapter={c.adapter.name} with method=export: it merges an adapter that is trained, and none is named",
        lambda c: "adapter.path=<run>/adapter, or adapter=none",
    ),
    Rule(
        "export_precision",
        lambda c: exports(c) and c.adapter.name == "none" and not c.smoke and c.precision.name != next(iter(c.hardware.precisions), "fp32"),
        lambda c: f"precision={c.precision.name} with method=export: weights are converted, nothing is computed, and it would be ignored",
        lambda c: "method.args.weights=",
    ),
    Rule(
        "export_formats",
        lambda c: exports(c) and argument(c, "formats") == [],
        lambda c: "method.args.formats=[]: safetensors are written in any case",
        lambda c: "method.args.formats=[safetensors]",
    ),
    Rule(
        "export_gguf",
        lambda c: exports(c) and _gguf(c) != bool(argument(c, "gguf_converter")),
        lambda c: (
            "method.args.formats with gguf and no converter: llama.cpp's own writes it"
            if _gguf(c)
            else f"method.args.gguf_converter={argument(c, 'gguf_converter')} without gguf in formats: it would be ignored"
        ),
        lambda c: "method.args.formats=[safetensors,gguf] method.args.gguf_converter=<llama.cpp>/convert_hf_to_gguf.py",
    ),
    Rule(
        "export_gguf_8_bits",
        lambda c: exports(c) and _gguf(c) and argument(c, "weights") in IN_8_BITS,
        lambda c: f"method.args.weights={argument(c, 'weights')} with gguf: these 8 bits are vLLM's and transformers', not llama.cpp's",
        lambda c: "method.args.weights=bf16, and llama-quantize on model.gguf; or formats=[safetensors]",
    ),
    Rule(
        "export_license",
        lambda c: exports(c) and argument(c, "license") is not None and not LICENSE.fullmatch(str(argument(c, "license"))),
        lambda c: f"method.args.license={argument(c, 'license')!r}: it is the hub's name of a licence",
        lambda c: "method.args.license=apache-2.0, for example; other, where the hub has no name for it",
    ),
    Rule(
        "export_push_to",
        lambda c: exports(c) and argument(c, "push_to") is not None and not REPOSITORY.fullmatch(str(argument(c, "push_to"))),
        lambda c: f"method.args.push_to={argument(c, 'push_to')}: no repository of the hub",
        lambda c: "method.args.push_to=<owner/name>",
    ),
    Rule(
        "export_push_private",
        lambda c: exports(c) and not argument(c, "push_private") and not argument(c, "push_to"),
        lambda c: "method.args.push_private=false without push_to: nothing is pushed, and it would be ignored",
        lambda c: "method.args.push_to=<owner/name>",
    ),
    Rule(
        "export_push_container",
        lambda c: (
            exports(c)
            and bool(argument(c, "push_to"))
            and c.runtime.on_node == "docker"
            and (c.runtime.network == Network.none or TOKEN not in c.runtime.secrets)
        ),
        lambda c: (
            f"method.args.push_to={argument(c, 'push_to')} in a container "
            + ("without a network" if c.runtime.network == Network.none else f"that is not given {TOKEN}")
        ),
        lambda c: f"runtime.network=bridge and {TOKEN} among runtime.secrets; or {runtime_as(c, 'local')}",
    ),
]
