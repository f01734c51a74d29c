"""Test the runs and the evaluation in the provenance of an exported model."""

from __future__ import annotations

import json
from pathlib import Path

from launch.config.compose import compose
from launch.core.json_files import plain
from launch.execution import provenance
from tests.conftest import composed


def files_of(folder: Path, **content) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_provenance_ends_where_another_version_wrote_the_record(tmp_path, capsys):
    older = plain(composed("hardware=cpu"))
    del older["data"]["sources"]  # a key of newer versions
    older["model"]["path"] = str(
        files_of(tmp_path / "odd", record={"composition": {"model": {"path": None}}}) / "model"
    )
    odd = {"packages": ["torch"], "data": ["a.jsonl"], "code": "b6a24b8"}
    newest = files_of(tmp_path / "newest", record={"composition": older, **odd}) / "model"
    (found,) = provenance.of(compose(["hardware=cpu", "method=export", f"model.path={newest}"]))[
        "runs"
    ]
    assert (found["run"], found["data"]["sources"]) == ("newest", [])
    assert (found["packages"], found["data_files"], found["code"]) == ({}, {}, {})
    said = capsys.readouterr().err
    assert f"warning: {tmp_path}/odd/record.json: " in said
    assert "the model card omits" in said


def test_provenance_goes_back_to_the_first_model(tmp_path):
    runs = {}
    before = None
    for name in ("sft", "grpo"):
        composition = plain(composed("hardware=cpu", f"method={name}"))
        composition["model"]["path"] = before
        runs[name] = files_of(
            tmp_path / name,
            record={"composition": composition, "overrides": [name]},
            result={"steps": 2, "loss": 0.5},
        )
        before = str(runs[name] / "model")
    config = compose(["hardware=cpu", "method=export", f"model.path={before}"])
    found = provenance.of(config)
    assert [(run["method"], run["overrides"], run["result"]) for run in found["runs"]] == [
        ("grpo", ["grpo"], {"steps": 2, "loss": 0.5}),
        ("sft", ["sft"], {"steps": 2, "loss": 0.5}),
    ]
    checkpoint_of = str(runs["sft"] / "checkpoints/checkpoint-4")
    sft = compose(["hardware=cpu", "method=export", f"model.path={checkpoint_of}"])
    assert [run["run"] for run in provenance.of(sft)["runs"]] == ["sft"]
