"""Test that errors about other formats contain the format and a command that converts it."""

import gzip
import json
import shlex
import subprocess
import sys

import pytest

from launch.core.errors import UserError
from launch.core.json_lines import MAX_ROW
from launch.inputs.jsonl_files import check_is_file
from recipes.data.data_load import lines
from tests.helpers.data_rows import data_config

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
DATA = data_config("jsonl")
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def error_of(path, key="data.path"):
    with pytest.raises(UserError) as raised:
        check_is_file(key, path)
    return str(raised.value)


@pytest.mark.parametrize(("name", "content", "problem", "command"), [
    ("a.jsonl", b'"prompt";"completion"\na;b\n', "CSV, judging by its first line",
     'sep=";")["train"].to_json('),
    ("a.parquet", b"PAR1\x15\x04", "Parquet", 'datasets.load_dataset("parquet"'),
    ("a.json", json.dumps(ROWS, indent=1).encode(), "a JSON list", 'datasets.load_dataset("json"'),
    # mtime: every worker must collect the same bytes
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0), "compressed", 'load_dataset("json"'),
    ("a.jsonl", LINES.decode().encode("utf-16"), "not UTF-8", "iconv -f UTF-16 -t UTF-8 "),
])  # fmt: skip
def test_other_file_formats_are_named(tmp_path, name, content, problem, command):
    path = tmp_path / name
    path.write_bytes(content)
    for key in ("data.path", "data.sources[1].path"):
        message = error_of(path, key)
        assert message.startswith(f"{path}:1: {problem}")
        assert command in message
    check_is_file("data.pass_rates", path)  # has no rows


@pytest.mark.parametrize(
    ("missing", "there", "hint"),
    [("note.jsonl", "note.md", ""), ("note.json", "note.jsonl", " Did you mean note.jsonl?")],
)
def test_only_files_of_a_similar_type_are_suggested(tmp_path, missing, there, hint):
    (tmp_path / there).touch()
    assert error_of(tmp_path / missing).endswith(f"no such file.{hint}")


def test_templates_are_utf_8(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_bytes(b"caf\xe9")
    assert error_of(path, "model.chat_template").startswith(f"model.chat_template={path}: not UTF")
    path.write_bytes("\ufeffcafé".encode())
    check_is_file("model.chat_template", path)


def test_the_command_makes_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    path = tmp_path / "it's.csv"
    path.write_text("prompt,completion\na,b\nc,d\n")
    command = shlex.split(error_of(path).partition("Use: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)
    assert list(lines(str(tmp_path / "it's_rows.jsonl"), DATA, "sft")) == ROWS


def test_the_size_of_a_row_is_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b"\0" * MAX_ROW + b"\n")
    assert error_of(path).startswith(f"{path}:3: a row of more than 32 MiB")
    largest = MAX_ROW - len('{"text": ""}\n')
    path.write_text('{"text": "' + "a" * largest + '"}\n')
    check_is_file("data.path", path)
    assert len(next(lines(str(path), DATA, "sft"))["text"]) == largest


def test_bytes_that_are_not_utf_8_name_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b'{"prompt": "caf\xe9", "completion": "x"}\n')
    message = error_of(path)
    assert message.startswith(f"{path}:3: not UTF-8 (byte 0xe9 at position 16 of the line)")
    assert "iconv -f WINDOWS-1252 " in message
    with pytest.raises(UserError, match="a.jsonl:3: .*UTF-8.*0xe9"):
        list(lines(str(path), DATA, "sft"))


MAPPING = "data.columns.prompt=instruction data.columns.completion=output."


@pytest.mark.parametrize(("row", "command"), [
    ({"conversations": TURNS}, "rename conversations to messages and, in each turn, from to role"),
    ({"instruction": "a", "input": "x", "output": "b"}, "join instruction and input as prompt"),
    ({"instruction": "a", "input": "", "output": "b"}, MAPPING),
    ({"instruction": "a", "input": None, "output": "b"}, MAPPING),
    ({"instruction": "a", "output": "b"}, MAPPING),
])  # fmt: skip
def test_fields_of_other_programs_have_a_renaming(tmp_path, row, command):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        UserError,
        match=f"jsonl:1: has {', '.join(row)}, but method=sft needs .* Use: {command}",
    ):
        list(lines(str(path), DATA, "sft"))
    path.write_text(json.dumps(row | ROWS[0]) + "\n")
    check_is_file("data.path", path)
    assert len(list(lines(str(path), DATA, "sft"))) == 1


@pytest.mark.parametrize(
    "content", [LINES, b"\xef\xbb\xbf" + LINES, b"\n" + LINES.replace(b"\n", b"\r\n")]
)
def test_jsonl_with_a_byte_order_mark_or_other_line_ends(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    check_is_file("data.path", path)
    assert list(lines(str(path), DATA, "sft")) == ROWS
