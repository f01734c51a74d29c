"""Test prepared rows: the cache and its key, and rejected rows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from omegaconf import OmegaConf

from launch.core.errors import UserError
from launch.core.json_files import plain
from launch.schema import Data
from launch.schema.data import Filter
from recipes.data import data_prepare
from recipes.data.data_load import Loaded, rows_sha256
from recipes.data.data_prepare import (
    cache_key,
    load_once,
    map_cached,
    prepare_prompts,
    statistics,
)
from recipes.data.data_tokens import drop_end_token
from recipes.models.model_build import train_tokenizer
from recipes.rank.files import json_sha256

ROWS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{n} plus {10**n}"}]} for n in range(6)]
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["1 plus 2"], 300)


def configured(tmp_path, method="grpo", positions=1024, **filters):
    data = plain(Data(name="jsonl", kind="jsonl", filter=Filter(**filters)))
    args = {"max_completion_length": 8, "max_length": 12, "per_device_train_batch_size": 2}
    return OmegaConf.create(
        {
            "run_dir": str(tmp_path),
            "data_cache": {"directory": str(tmp_path / "cache"), "key": "k"},
            "data": data,
            "model": {"name": "tiny", "max_positions": positions},
            "method": {"name": method},
            "topology": {"servers": 0},
            "trainer_args": args,
        }
    )


def test_the_key_changes_with_rows_tokenizer_template_and_code(tokenizer, monkeypatch):
    def key(rows=ROWS, spelling=tokenizer, template="t", **arguments):
        return cache_key(rows_sha256(rows), spelling, template, arguments)

    actual = [
        key(),
        key(ROWS.select(range(5))),
        key(spelling=train_tokenizer(["1 plus 2 plus"], 300)),
        key(template="u"),
        key(mask=True),
    ]
    monkeypatch.setattr(data_prepare, "trl", SimpleNamespace(__version__="0"))
    actual.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(data_prepare, "sha256", lambda path: "another file")
    assert len({*actual, key()}) == 7
    monkeypatch.undo()
    # equal content, equal key
    assert key(Dataset.from_list(ROWS.to_list()), train_tokenizer(["1 plus 2"], 300)) == actual[0]


def test_rows_are_made_once_despite_an_incomplete_write(tmp_path):
    config, calls = configured(tmp_path), []
    (tmp_path / "cache/rows/.key.1").mkdir(parents=True)  # left by a killed process

    def make(batch):
        calls.append(len(batch["prompt"]))
        return {"length": [len(prompt) for prompt in batch["prompt"]]}

    first, again = (
        map_cached(config, "key", ROWS, make, ("prompt",)),
        map_cached(config, "key", ROWS, make),
    )
    assert first.to_list() == again.to_list() == [{"length": 1}] * len(ROWS)
    assert calls == [len(ROWS)]
    assert (tmp_path / "heartbeat").is_file()


@pytest.mark.parametrize("kind", ["jsonl", "hub"])
def test_files_are_read_again_only_if_their_content_changes(tmp_path, capsys, kind):
    config, folder = configured(tmp_path, "sft"), tmp_path / "set"
    path = folder / "rows.jsonl"
    folder.mkdir()
    config.data.kind = kind
    config.data.update({"path": str(path)} if kind == "jsonl" else {"hub_id": str(folder)})
    lines = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    first, again = load_once(config, "sft"), load_once(config, "sft")
    assert "reusing prepared rows" in capsys.readouterr().out
    assert first.rows.to_list() == again.rows.to_list() == lines
    assert first.counts == again.counts == {"read": 5, "rows": 5}
    assert first.sha256() == again.sha256() == {"data_sha256": json_sha256(lines)}
    path.write_text(json.dumps(lines[0]) + "\n")
    assert load_once(config, "sft").rows.to_list() == lines[:1]
    config.data.filter.regex = {"prompt": "9"}
    with pytest.raises(UserError, match="no rows.*regex.prompt"):
        load_once(config, "sft")


def test_prompts_are_filtered_by_tokens_and_described(tmp_path, tokenizer):
    prompts = prepare_prompts(
        configured(tmp_path, max_prompt_tokens=8), Loaded(ROWS, {"read": 6}), tokenizer
    )
    options = {"add_generation_prompt": True, "return_dict": False}
    lengths = [len(tokenizer.apply_chat_template(row["prompt"], **options)) for row in ROWS]
    pairs = zip(ROWS.to_list(), lengths, strict=True)
    assert prompts.to_list() == [row for row, length in pairs if length <= 8]
    described = json.loads((tmp_path / "data.json").read_text())
    assert described == json.loads((tmp_path / "cache/statistics/k.json").read_text())
    assert described["filtered"] == {"max_prompt_tokens": 6 - len(prompts)}
    assert described["length"]["shortest"] == min(lengths)
    assert described["rows"] == sum(n for *_, n in described["histogram"]) == len(prompts)


def test_lengths_of_prompts_include_the_arguments_of_the_template(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 'plus ' * times }}")
    config = configured(tmp_path)
    for times in (2, 3):
        config.trainer_args = {"chat_template_kwargs": {"times": times}}
        prepare_prompts(config, Loaded(ROWS, {"read": 6}), tokenizer)
        length = json.loads((tmp_path / "data.json").read_text())["length"]["longest"]
        assert length == len(tokenizer("plus " * times, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_that_cannot_be_rendered_is_located(tmp_path, streaming):
    strict = train_tokenizer(["1 plus 2"], 300)
    strict.chat_template = "{{ raise_exception('No system.') if messages[0].role == 'system' }}1"
    config, path = configured(tmp_path), tmp_path / "rows.jsonl"
    rows = [*ROWS.to_list(), {"prompt": [{"role": "system", "content": [], "name": None}]}]
    path.write_text("\n" + "\n".join(map(json.dumps, rows)))
    config.data.path, config.data.streaming, config.data.shuffle_buffer = str(path), streaming, 1
    with pytest.raises(UserError, match=rf"^{path}:{len(rows) + 1}: .*: No system\. "):
        next(iter(prepare_prompts(config, load_once(config, "grpo"), strict)))


def test_a_prompt_that_is_too_long_is_quoted(tmp_path, tokenizer):
    config = configured(tmp_path, positions=40)
    texts = ["short", "also short", "much longer " * 9]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
    with pytest.raises(UserError, match=r"1 of 3 .*: 'much longer"):
        prepare_prompts(config, Loaded(rows), tokenizer, heldout=True)


def test_statistics_equal_manual_counts(tmp_path):
    lengths = {"tokens": np.array([6, 6, 20]), "prompt": np.array([2, 6, 2]), "filtered": {}}
    actual = statistics(configured(tmp_path, "sft"), lengths, None)
    assert (actual["truncated"], actual["tokens"], actual["without_answer"]) == (1, 6 + 6 + 12, 1)
    assert actual["histogram"][0][0] == 6
    assert [n for *_, n in actual["histogram"] if n] == [2, 1]
    # The long row is in a batch with a short one, or alone.
    assert actual["efficiency"] in (24 / (12 * 2 + 6), 24 / (6 * 2 + 12))
    packed = Dataset.from_dict({"input_ids": [[0] * 12, [0] * 12]})
    assert statistics(configured(tmp_path, "sft"), lengths, packed)["efficiency"] == 1.0


def test_truncated_rows_lose_their_end_token():
    # 9 is the end token, followed by the line break 7.
    row = {"input_ids": [9, 1, 5, 6, 9, 7], "labels": [-100, -100, 5, 6, 9, 7]}
    assert drop_end_token({**row, "finished": False}, {9}) == {
        "input_ids": [9, 1, 5, 6],
        "labels": [-100, -100, 5, 6],
    }
    for finished in (True, None):
        assert drop_end_token({**row, "finished": finished}, {9}) == row
    with pytest.raises(UserError, match="finished_only=true"):
        drop_end_token({**row, "finished": False, "labels": [-100] * 6}, {9})


def test_a_template_beyond_the_limits_of_jinja_is_a_user_error(tmp_path, tokenizer, monkeypatch):
    template = "{% for i in range(10**8) %}{{ i }}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="chat template.*Range too big"):
        prepare_prompts(configured(tmp_path), Loaded(ROWS), tokenizer)
