"""launch/core/json_files.py: files that several processes write."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.core.json_files import write_json


def test_several_may_write_one_file_at_once(tmp_path: Path) -> None:
    """Runs that start together describe the same rows in the same cache."""
    file = tmp_path / "cache" / "rows.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_json(file, {"number": number}), range(200)))
    assert json.loads(file.read_text())["number"] in range(200)
    with pytest.raises(ValueError):
        write_json(file, {"number": float("nan")})
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]
