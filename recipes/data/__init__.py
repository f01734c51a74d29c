"""Rows: their fields, and how they are read, chosen, ordered and tokenized."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class Later(types.ModuleType):
    """Stand for a module and import it when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that scans sys.modules reads these; do not import for it
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# Only two of reasoning-gym's hundred tasks need cellpylib, which imports matplotlib and takes 2 s.
sys.modules.setdefault("cellpylib", Later("cellpylib"))
