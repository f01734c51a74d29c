"""A plugin for vLLM that forces the length of every completion.

It is needed because random weights hardly ever end a completion. `install` writes the plugin's
metadata to a folder. Every engine that has this folder on its PYTHONPATH loads the plugin.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests.gpu.speed_rows import LONGEST, forced_lengths


def install(folder: Path) -> None:
    info = folder / "forced_lengths-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forced_lengths\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nforced_lengths = tests.gpu.forced_lengths:register\n"
    )


def register() -> None:
    """Give requests for LONGEST tokens the lengths of forced_lengths, in order of arrival."""
    from vllm.v1.request import Request

    lengths = itertools.cycle(forced_lengths())
    original = Request.from_engine_core_request

    def with_forced_length(request: Any, block_hasher: Any) -> Request:
        parameters = request.sampling_params
        if parameters is not None and parameters.max_tokens == LONGEST:
            parameters.max_tokens = parameters.min_tokens = next(lengths)
        return original(request, block_hasher)

    Request.from_engine_core_request = staticmethod(with_forced_length)
