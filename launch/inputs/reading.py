"""Read users' files. Errors name the file, the problem and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.core.errors import UserError, near


def near_files(path: Path) -> str:
    """Return a hint with similar names of a similar type next to a missing path, or ''."""
    others = path.parent.iterdir() if path.parent.is_dir() else ()
    return near(path.name, [p.name for p in others if p.suffix.startswith(path.suffix[:2])])


def json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model or adapter. Raises UserError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it must be a JSON object, but is a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: damaged: {error}. Copy or download it again.") from error
    return content
