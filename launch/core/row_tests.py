"""Read the tests of programming problems."""

import json
from typing import Any

from launch.core.errors import UserError

FORMS = ({"call", "expected"}, {"stdin", "stdout"}, {"check"})


def parse_tests(column: Any) -> list[dict[str, Any]]:
    """Return a row's tests from column `tests`. Raises UserError if they are malformed."""
    try:
        items = json.loads(column) if isinstance(column, str) else column
    except json.JSONDecodeError:
        items = None
    parsed = [_parse_test(item) for item in items] if isinstance(items, list) else []
    tests = [test for test in parsed if test is not None]
    if not tests or len(tests) < len(parsed):
        forms = ", ".join("{" + ", ".join(sorted(form)) + "}" for form in FORMS)
        raise UserError(
            f"column 'tests' has {str(column)[:80]!r}, but must be a non-empty list (or its JSON) "
            f"of {forms} (all strings except expected), or of Python statements. Fix the row."
        )
    return tests


def _parse_test(item: Any) -> dict[str, Any] | None:
    """Return a test in one of FORMS, or None if it is malformed."""
    if isinstance(item, str):
        return {"check": item}
    items = item.items() if isinstance(item, dict) else ()
    test = {key: value for key, value in items if value is not None or key == "expected"}
    if "call" not in test:  # tables fill missing keys with null
        test.pop("expected", None)
    texts = [value for key, value in test.items() if key != "expected"]
    is_valid = set(test) in FORMS and all(isinstance(value, str) for value in texts)
    return test if is_valid else None
