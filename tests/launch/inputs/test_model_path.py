"""A plan of one model and a directory of another."""

import json

import pytest

from launch.inputs import model_path
from tests.conftest import composed, leave_model

QWEN3_0_6B = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024}
QWEN3_0_6B |= {"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3_0_6B |= {"vocab_size": 151936, "max_position_embeddings": 40960}


def warned(tmp_path, content, *overrides):
    (tmp_path / "config.json").write_text(content)
    return model_path.warnings(composed("hardware=cpu", f"model.path={tmp_path}", *overrides))


def test_a_directory_of_another_model_is_named_with_its_group_or_asks_for_its_numbers(tmp_path):
    [line] = warned(tmp_path, json.dumps(QWEN3_0_6B))
    assert "num_layers 28, hidden_size 1024" in line
    assert "use model=tiny: 4, 128" in line
    assert line.endswith("Use: model=qwen3_0_6b.")
    shallow = json.dumps({**QWEN3_0_6B, "num_hidden_layers": 14})
    [line] = warned(tmp_path, shallow, "model=qwen3_0_6b")
    assert "model=qwen3_0_6b: 28. Use: the closest model=" in line
    assert warned(tmp_path, shallow, "model=qwen3_0_6b", "model.num_layers=14") == []


@pytest.mark.parametrize(("content", "said"), [
    ("{", "damaged: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[" * 100_000, "damaged: maximum recursion depth"),
    ("[1]", "damaged: it must be a JSON object"),
], ids=range(3))  # fmt: skip
def test_a_config_that_is_none_of_a_model_is_refused(launch, tmp_path, content, said):
    leave_model(tmp_path)
    (tmp_path / "config.json").write_text(content)
    done = launch("hardware=cpu", f"model.path={tmp_path}", "mode=plan")
    assert done.code == 2
    assert done.err.startswith(f"{tmp_path}/config.json: {said}")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    assert launch("hardware=cpu", f"model.path={tmp_path}", "mode=plan").code == 0
