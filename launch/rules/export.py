"""Define rules about exports."""

from __future__ import annotations

from launch.rules.rule import Rule, rule_of
from launch.rules.runtime import runtime_as
from launch.schema import Config
from launch.schema.enums import Init, Network
from launch.schema.trainer_args import argument

TOKEN = "HF_TOKEN"


def exports(config: Config) -> bool:
    return config.method.exports


def _source_fault(config: Config) -> tuple[str, str] | None:
    model, adapter = config.model, config.adapter
    if not exports(config):
        return None
    # Under smoke=true a phase's model is filled in later. The rank rejects a missing one.
    if not model.path and model.init == Init.random and not config.smoke:
        return (
            f"model={model.name} has random weights; there is nothing to export",
            "model.path=<run>, or model_from in a phase",
        )
    if adapter.name != "none" and not adapter.path:
        return (
            f"adapter={adapter.name} with method=export needs a trained adapter",
            "adapter.path=<run>/adapter, or adapter=none",
        )
    return None


EXPORT_RULES = [
    rule_of("export_source", _source_fault),
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
