"""Report what TRL and transformers reject about a composition as one message."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import UserError

REJECTIONS = (ValueError, TypeError, NotImplementedError, ImportError, OSError)


@contextlib.contextmanager
def rejections(key: str, owner: str) -> Iterator[None]:
    """Raise UserError if a constructor of a library rejects the arguments at `key`.

    `owner` is the class. The message ends with the line of code that raised the error, because the
    traceback is not shown. transformers raises OSError without a number for a name that is neither
    a directory nor on the Hub.
    """
    try:
        yield
    except REJECTIONS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{key}: {owner} rejects this: {reason} ({Path(last.filename).name}:{last.lineno}). "
            "Change or leave out the argument that it names."
        ) from error


class ReportedRejections:
    """Report rejections by TRL's trainer, the optimizer and the scheduler.

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
