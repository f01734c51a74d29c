"""Define the required fields of record.json, and the hash that reveals a changed record."""

import hashlib
import json
from typing import Any

REQUIRED = (
    "schema run_id parent status exit_code started finished overrides composition composition_hash "
    "argv environment secrets code packages locks image model data seeds host metrics result "
    "outputs sha256"
).split()
# A pipeline's record has fewer fields, because each phase has its own record.
REQUIRED_OF_A_PIPELINE = (
    "schema run_id status exit_code overrides composition composition_hash phases sha256"
).split()


def seal(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the hash of its content in `sha256`."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    content = json.loads(json.dumps(content))  # numeric keys become text, as when it is read
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "sha256": digest}


def problems(record: dict[str, Any]) -> list[str]:
    """Return the reasons why a record cannot be trusted: missing fields, or changed content."""
    required = REQUIRED_OF_A_PIPELINE if "phases" in record else REQUIRED
    missing = [f"{name}: missing" for name in required if name not in record]
    if missing or seal(record)["sha256"] == record["sha256"]:
        return missing
    return ["sha256: the content was changed after it was written"]


def problem(record: dict[str, Any]) -> str | None:
    """Return the first problem as a sentence without a period; None if there is none."""
    reasons = problems(record)
    return f"its record.json cannot be trusted ({reasons[0]})" if reasons else None
