"""Load, check, select, order and tokenize rows of data."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class LazyModule(types.ModuleType):
    """Stand in for a module, and import it at the first use of an attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by code that scans sys.modules
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# Importing cellpylib takes 2 s (matplotlib), and only two of reasoning-gym's 100 tasks need it.
sys.modules.setdefault("cellpylib", LazyModule("cellpylib"))
