"""Test files that several processes write."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.core.json_files import write_json


def test_concurrent_writes_of_one_file(tmp_path: Path) -> None:
    """Runs that start together write the same files of the cache of rows."""
    file = tmp_path / "cache" / "rows.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_json(file, {"number": number}), range(200)))
    assert json.loads(file.read_text())["number"] in range(200)
    with pytest.raises(ValueError):
        write_json(file, {"number": float("nan")})
    assert [path.name for path in file.parent.iterdir()] == ["rows.json"]
