"""Report what TRL and transformers reject when a trainer is built."""

from __future__ import annotations

from typing import Any

from recipes.rank.rejections import rejections


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
