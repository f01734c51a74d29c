"""Report what TRL and transformers reject about a composition as one message."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.core.errors import UserError

# Errors by which constructors reject arguments and report missing packages.
REJECTIONS = (ValueError, TypeError, NotImplementedError, ImportError)


@contextlib.contextmanager
def rejections(name: str) -> Iterator[None]:
    """Raise UserError if a constructor of the library rejects its arguments.

    `name` is the class or setting. The message ends with the line of code that raised the error,
    because the traceback is not shown.
    """
    try:
        yield
    except REJECTIONS as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"method.args: {name} rejects the composition: {reason} ({Path(last.filename).name}:"
            f"{last.lineno}). Change the argument that it names, or leave it out."
        ) from error


class ReportedRejections:
    """Report rejections by TRL's trainer, the optimizer and the scheduler.

    This is a mixin, placed directly before TRL's trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        classes = type(self).__mro__
        with rejections(classes[classes.index(ReportedRejections) + 1].__name__):
            super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with rejections(f"optim={self.args.optim}"):
            return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with rejections(f"lr_scheduler_type={self.args.lr_scheduler_type}"):
            return super().create_scheduler(*args, **kwargs)
