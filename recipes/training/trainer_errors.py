"""Report what TRL and transformers reject when a trainer is built, and in its first step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from recipes.rank.rejections import rejections

OURS = ("fsdp_config", "deepspeed")  # the launcher writes these


class ReportedRejections:
    """Report rejections by TRL's trainer, the optimizer, the scheduler and the first step.

    This is a mixin, placed directly before TRL's trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        classes = type(self).__mro__
        with rejections("method.args", classes[classes.index(ReportedRejections) + 1].__name__):
            super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with rejections(f"method.args.optim={self.args.optim.value}", "the optimizer"):
            return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        name = self.args.lr_scheduler_type.value
        with rejections(f"method.args.lr_scheduler_type={name}", "the scheduler"):
            return super().create_scheduler(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and report an error of the first step if it names an argument.

        Some arguments are not read earlier. Any other error may be a bug and keeps its traceback.
        """
        if self.state.global_step > 0:
            return super().training_step(*args, **kwargs)
        try:
            return super().training_step(*args, **kwargs)
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            if (argument := _named(str(error), self.args)) is None:
                raise
            with rejections(f"method.args.{argument}", "the first step"):
                raise


def _named(text: str, args: Any) -> str | None:
    """Return the argument, with its value, that a message names; None if it names none.

    A message names an argument without its default, or a key of its mapping, such as stop_strings
    or "stop strings". Names of one word, such as seed, occur in any message.
    """
    for field in dataclasses.fields(args):
        value, patterns = getattr(args, field.name), list[str]()
        if isinstance(value, dict) and field.name not in OURS:
            patterns = [re.escape(str(key)).replace("_", "[_ ]") for key in value]
        elif value != field.default and "_" in field.name:
            patterns = [field.name]
        if any(re.search(rf"\b{pattern}\b", text) for pattern in patterns):
            return f"{field.name}={value}"
    return None
