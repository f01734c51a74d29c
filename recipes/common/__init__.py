"""What two or more recipes share."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class Later(types.ModuleType):
    """A module that is imported where something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what looks at every module that there is uses none
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# Two of reasoning-gym's hundred tasks need it, and it imports matplotlib: 2 s of every start.
sys.modules.setdefault("cellpylib", Later("cellpylib"))
