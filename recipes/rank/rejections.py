"""Report what TRL and transformers reject about a composition as one message."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import httpx
from huggingface_hub.errors import StrictDataclassError

from launch.core.errors import UserError

# transformers checks a model's configuration with StrictDataclassError.
REJECTIONS = (
    ValueError,
    TypeError,
    NotImplementedError,
    ImportError,
    OSError,
    StrictDataclassError,
    httpx.HTTPError,  # push_to_hub without a network
)


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
