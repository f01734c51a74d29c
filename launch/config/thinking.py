"""Turn a model's thinking off: in GRPO, sampling and evaluation, and in use of their models."""

from __future__ import annotations

from typing import Any

from launch.config import follow_run
from launch.inputs import model_path
from launch.schema import Config

ARGS = "chat_template_kwargs"  # TRL's name; sampling and evaluation use the same
SWITCH = "enable_thinking"  # variable of the chat templates of Qwen and SmolLM3
KEY = f"method.args.{ARGS}.{SWITCH}"
# model_type -> its templates have SWITCH, for models whose template is not on this machine
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "smollm3")
# Nearly all thoughts are longer. Cut off before the answer, they score 0.
SHORT_TOKENS = 2048
LIMITS = ("max_completion_length", "max_new_tokens")


def follow_template(config: Config, run: dict[str, Any]) -> None:
    """Set method.args.chat_template_kwargs unless the user did.

    An evaluation, a chat and a server have the value of `run`, which trained the model. Others have
    no thinking; a chat or a server of a model that no run trained has the template's default.
    """
    method, trainer = config.method, run.get("method") or {}
    follows = method.kind in ("evaluator", "chat", "service")
    if ARGS in method.args or not (method.generates or follows):
        return
    if method.kind in ("chat", "service") and trainer.get("kind") != "trainer":
        return
    recorded = (trainer.get("args") or {}).get(ARGS)
    if recorded and follows:
        method.args[ARGS] = dict(recorded)
        follow_run.add(config, f"method.args.{ARGS}", method.args[ARGS])
    elif _has_switch(config):
        method.args[ARGS] = {SWITCH: False}


def of(config: Config) -> bool | None:
    """Return whether the model thinks before it answers; None if the run does not decide that."""
    value = (config.method.args.get(ARGS) or {}).get(SWITCH)
    return value if isinstance(value, bool) else None


def cut_off(config: Config) -> tuple[str, int] | None:
    """Return the key and value of a limit that is too short for thinking."""
    limits = ((name, config.method.args.get(name)) for name in LIMITS)
    short = ((name, n) for name, n in limits if isinstance(n, int) and n < SHORT_TOKENS)
    return next(short, None) if of(config) else None


def _has_switch(config: Config) -> bool:
    model = config.model
    template = model_path.chat_template(config)
    if template is not None:
        return SWITCH in template
    hub_id = model.hub_id or ""
    return bool(hub_id) and model.architecture in FAMILIES and "-Thinking" not in hub_id
