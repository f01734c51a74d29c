"""What every record.json has, and the hash of its own content by which a change is seen."""

from __future__ import annotations

import hashlib
import json
from typing import Any

REQUIRED = [
    "schema",
    "run_id",
    "parent",
    "status",
    "exit_code",
    "started",
    "finished",
    "overrides",
    "composition",
    "composition_hash",
    "argv",
    "environment",
    "secrets",
    "code",
    "packages",
    "locks",
    "image",
    "model",
    "data",
    "seeds",
    "host",
    "metrics",
    "result",
    "outputs",
    "sha256",
]

# A pipeline's own record: what was run stands in the records of its phases.
REQUIRED_OF_A_PIPELINE = ["schema", "run_id", "status", "exit_code", "overrides", "composition", "composition_hash", "phases", "sha256"]


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the hash of its own content, by which a changed field is seen."""
    content = json.loads(json.dumps({key: value for key, value in record.items() if key != "sha256"}))  # keys that are numbers become text
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def faults(record: dict[str, Any]) -> list[str]:
    """Why a record, of a run or of a pipeline, cannot be trusted: fields that are missing, or content changed after it was written."""
    required = REQUIRED_OF_A_PIPELINE if "phases" in record else REQUIRED
    missing = [f"{name}: missing" for name in required if name not in record]
    if missing:
        return missing
    return [] if seal(record)["sha256"] == record["sha256"] else ["sha256: the content was changed after it was written"]


def doubt(record: dict[str, Any]) -> str | None:
    """The first fault in a person's words."""
    found = faults(record)
    return f"its record.json cannot be trusted ({found[0]})" if found else None
