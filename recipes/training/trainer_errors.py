"""Report what TRL and transformers reject when a trainer is built, and in its first step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from recipes.rank.rejections import rejections


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
            text = str(error)
            named = (a for a, words in changed(self.args) if any(_has(text, w) for w in words))
            if (argument := next(named, None)) is None:
                raise
            with rejections(f"method.args.{argument}", "the first step"):
                raise


def changed(args: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument without its default, and its words: a mapping's keys, or its name."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, dict) and value:
            yield f"{field.name}={value}", [*map(str, value)]
        elif value != field.default and field.default_factory is dataclasses.MISSING:
            yield f"{field.name}={value}", [field.name]


def _has(text: str, word: str) -> bool:
    """Return whether a message contains a name, such as stop_strings, or "stop strings"."""
    pattern = re.escape(word).replace("_", "[_ ]")
    return re.search(rf"\b{pattern}\b", text, re.IGNORECASE) is not None
