"""Check the rows of local files before processes start, as the ranks do when they load them."""

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch.core import row_formats
from launch.core.errors import UserError, near_or_all
from launch.core.json_lines import json_rows
from launch.core.near_names import columns_hint
from launch.core.row_check import (
    are_messages,
    check_forms,
    check_row,
    conformed,
    form_of,
    trainer_fields,
)
from launch.core.row_columns import mapped, mapping_of
from launch.core.row_messages import Row
from launch.core.row_tests import parse_tests
from launch.inputs import model_path
from launch.inputs.jsonl_files import check_is_file
from launch.inputs.reward_files import columns_of
from launch.schema import Config, trainer_args
from launch.schema.data import Balance, Data
from launch.schema.enums import Init
from launch.schema.trainer_args import value_or_none

PLAN_LINES = 10_000  # lines whose fields mode=plan checks; a run checks all
FIRST_ROWS = 500  # rows whose values are checked, which takes a hundredth of a second
TOKENIZER = "tokenizer"  # in place of a row format
TEMPLATE_ONLY = "data.system_prompt=''"  # turns text prompts into messages
# What recipes/rewards/answers.py takes for the final answer at the end of a solution.
FINAL_ANSWER = re.compile(r"####|\\boxed\{|\banswer(?:\s+is\b|\s*:)", re.IGNORECASE)
LATEX_COMMAND, WORD = re.compile(r"\\[A-Za-z]+"), re.compile(r"[^\W\d_]{2,}")
ANSWER_WORDS, ANSWER_LETTERS = 8, 80  # of an answer that a model may repeat; our choice


@dataclass(frozen=True)
class _File:
    """A file, the format that its rows need, if any, and the keys that map its fields."""

    key: str
    path: Path
    row_format: str | None
    data: Data
    is_training: bool = True


def check_rows(config: Config, all_lines: bool) -> None:
    """Raise UserError for the first row that the run could not use.

    Without `all_lines`, read only the first PLAN_LINES lines of a file.
    """
    forms, mixed = dict[str, str](), list[set[str] | None]()
    for file in _files(config):
        check_is_file(file.key, file.path)
        fields = _check_file(config, file, forms, None if all_lines else PLAN_LINES)
        if config.data.sources:
            mixed.append(fields)
        elif file.row_format == config.method.rows:
            _check_rewards(config, file.key, fields)
    if forms:
        check_forms(forms, [*forms.values()][-1], str(config.method.rows))
    if len(mixed) == len(config.data.sources) and None not in mixed:
        _check_rewards(config, "data.sources", set().union(*filter(None, mixed)))


def text_prompts(config: Config, keys: Collection[str]) -> str | None:
    """Return the key of a file whose prompts are text although the model has a chat template.

    Return None if data.system_prompt is in `keys`, which the user set, or if an evaluation has the
    rows of the training.
    """
    method = config.method
    is_chosen = "data.system_prompt" in keys or any(c.key == "data" for c in config.followed)
    if is_chosen or not (method.trains or method.kind == "evaluator"):
        return None
    if not model_path.has_chat_template(config):
        return None
    for file, rows in _first_rows(config, 1):
        if file.row_format == method.rows and rows:
            fields = trainer_fields(rows[0], str(file.row_format))
            if "prompt" in fields and isinstance(rows[0]["prompt"], str):
                return file.key
    return None


def row_warnings(config: Config, keys: Collection[str] = ()) -> Iterator[str]:
    """Warn of prompts without the model's chat template, and of answers that rewards cannot use.

    `keys` are the keys that the user set.
    """
    if key := text_prompts(config, keys):
        yield (
            f"{key}: prompt is text, so the model's chat template is not applied, but chats and "
            f"servers apply it. Use: {TEMPLATE_ONLY}, data.system_prompt='<instructions>', or a "
            'prompt of messages, such as [{"role": "user", "content": "..."}]; '
            "data.system_prompt=null keeps text."
        )
    method, columns = config.method, trainer_args.lock()["rewards"]
    needed = {columns.get(name) for name in method.rewards}
    if not (method.generates or method.kind == "evaluator"):
        return
    for file, rows in _first_rows(config, FIRST_ROWS):
        if not (rows and file.row_format and row_formats.FORMATS[file.row_format].rewards):
            continue
        prompt = rows[0].get("prompt")
        if isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
            yield (
                f"{file.key}: the prompt of the first row ends with a turn of the assistant, which "
                "the model continues. If that is the answer, leave it out (docs/data.md)."
            )
        answer = str(rows[0].get("answer") or "").strip()
        if "accuracy" in method.rewards and _is_solution(answer):
            yield (
                f"{file.key}: the answer of the first row is a whole text, which the reward "
                "accuracy compares with the model's final answer, so the reward is 0 unless the "
                "model repeats all of it. Use: 'data.answer_pattern=\"<pattern with one group>\"', "
                "or a reward of yours, such as "
                "'method.rewards={<module>.<function>: 1.0}'."
            )
        unscored = sum(all(row.get(name) is None for name in needed) for row in rows)
        if unscored and None not in needed and method.reward_pattern is None:
            yield (
                f"{file.key}: {unscored} of the first {len(rows)} rows have no "
                f"{' or '.join(sorted(needed))}, so no reward scores their answers. Remove these "
                "rows."
            )


def _is_solution(answer: str) -> bool:
    """Return whether an answer is a text without a final answer that recipes/rewards can find."""
    if FINAL_ANSWER.search(answer):
        return False
    words = WORD.findall(LATEX_COMMAND.sub("", answer))
    is_long = len(words) > ANSWER_WORDS or sum(map(len, words)) > ANSWER_LETTERS
    return is_long or "\n" in answer


def _first_rows(config: Config, number: int) -> Iterator[tuple[_File, list[Row]]]:
    """Yield each file, and its first rows as the method reads them. check_rows reports errors."""
    for file in _files(config):
        if file.row_format in row_formats.FORMATS:
            rows = mapped(json_rows(file.path), file.data, file.row_format)
            with contextlib.suppress(UserError):
                first = [row for _, row in itertools.islice(rows, number)]
                yield file, [conformed(row, str(file.row_format)) for row in first]


def _files(config: Config) -> Iterator[_File]:
    data, rows = config.data, config.method.rows
    for number, source in enumerate(data.sources):
        if source.path:
            mapping = replace(data, **mapping_of(data, source))
            yield _File(f"data.sources[{number}].path", Path(source.path), rows, mapping)
    if data.kind == "samples" and Path(data.path or "").is_file():
        yield _File("data.path", Path(str(data.path)), "samples", data, is_training=False)
    if data.kind != "jsonl":
        return
    train = rows
    if config.method.measures_model:
        # An evaluation holds out rows of data.path, makes a tokenizer from them, or does neither.
        makes_tokenizer = config.model.path is None and config.model.init == Init.random
        train = TOKENIZER if makes_tokenizer else None
        train = "evaluate" if data.heldout_fraction else train
    if data.path:
        yield _File("data.path", Path(data.path), train, data)
    if data.heldout_path:
        heldout = rows if config.method.selection.metric else "evaluate"
        yield _File("data.heldout_path", Path(data.heldout_path), heldout, data, is_training=False)


def _check_file(
    config: Config, file: _File, forms: dict[str, str], number: int | None
) -> set[str] | None:
    """Check a file's rows, and add the forms of its first rows, with places, to `forms`.

    Return the fields of all rows, or None if there are more than `number` lines.
    """
    place, reader, row_format = "", f"{file.key} of method={file.row_format}", file.row_format
    if row_format == TOKENIZER:
        row_format, reader = "sft", f"{file.key}, from which random weights get a tokenizer,"
    lacks_template = model_path.lacks_chat_template(config)
    has_template, reads = model_path.has_chat_template(config), _reward_columns(config)
    masks_turns = row_format == "sft" and value_or_none(config, "assistant_only_loss")
    present, lines = set[str](), json_rows(file.path)
    rows = mapped(itertools.islice(lines, number), file.data, row_format)
    for n, (place, row) in enumerate(rows):
        present.update(row)
        if row_format is None:
            continue
        if problem := row_formats.fields_problem(row, row_format, reader, reads):
            more = " Use: model.path=<a trained model>." if "tokenizer" in reader else ""
            if "data.columns.prompt=" in problem and file.data.system_prompt is None:
                more = f" Add {TEMPLATE_ONLY} for the model's chat template." * has_template
            raise UserError(f"{place}: {problem}{more}")
        if n < FIRST_ROWS:
            row = conformed(row, row_format)
            check_row(row, place, row_format)
            has_messages = any(map(are_messages, row.values()))
            if lacks_template and has_messages:
                raise UserError(
                    f"{place}: messages need a chat template, and {config.model.path} has none. "
                    "Use: model.chat_template=<file.jinja>, the model's instruct version, or rows "
                    "of text."
                )
            if masks_turns and not has_messages:
                raise UserError(
                    f"{place}: method.args.assistant_only_loss=true needs messages. "
                    "Use: method.args.assistant_only_loss=false (of a prompt with a completion, "
                    "only the completion is learned), or rows of messages."
                )
            if file.is_training and row_format == config.method.rows:
                forms.setdefault(form_of(row, row_format), place)
                _check_fields(config, place, row)
    if not place:
        key = file.key
        raise UserError(f"{key}={file.path}: the file has no rows. Use: {key}=<a file with rows>.")
    return present if next(lines, None) is None else None


def _check_fields(config: Config, place: str, row: Row) -> None:
    """Raise UserError if a row lacks a field of data.filter or data.balance, or has wrong tests."""
    filters, balance = config.data.filter, config.data.balance
    keys = {f"data.filter.equals.{name}": name for name in filters.equals}
    keys |= {f"data.filter.regex.{name}": name for name in filters.regex}
    keys |= {"data.filter.tasks": "task"} if filters.tasks else {}
    keys |= {"data.filter.levels": "level"} if filters.levels else {}
    keys |= {} if balance == Balance.none else {f"data.balance={balance.name}": balance.value}
    for key, name in keys.items():
        if name not in row:
            problem = f"the row has no field {name!r}.{near_or_all(name, row)}"
            raise UserError(f"{place}: {key}: {problem}")
    if "code_tests" in config.method.rewards and "tests" in row:
        try:
            parse_tests(row["tests"])
        except UserError as error:
            raise UserError(f"{place}: {error}") from error


def _reward_columns(config: Config) -> set[str]:
    """Return the columns that the rewards read."""
    columns, rewards = trainer_args.lock()["rewards"], config.method.rewards
    own = (column for name in rewards for column in columns_of(name, config))
    return {*own, *filter(None, map(columns.get, rewards))}


def _check_rewards(config: Config, key: str, present: set[str] | None) -> None:
    """Raise UserError if no row has the field that a reward reads. The fields may be unknown."""
    if not present:
        return
    for name in config.method.rewards:
        columns = present - {"prompt"}  # which rewards get as `prompts`
        missing = [column for column in columns_of(name, config) if column not in columns]
        if missing:
            names = [f for f, column in config.data.columns.items() if column == missing[0]]
            renamed = f" Remove data.columns.{names[0]}, which renames it." if names else ""
            if not names or names == ["prompt"]:
                renamed = " Use: prompts, completions, a column, or a default value."
            raise UserError(
                f"method.rewards.{name}: its parameter {missing[0]} is not a column of {key}, "
                f"which has {', '.join(sorted(columns)) or 'none'}.{renamed}"
            )
        field = trainer_args.lock()["rewards"].get(name)
        has_pattern = name == "regex" and config.method.reward_pattern is not None
        if field is not None and field not in present and not has_pattern:
            column = columns_hint(present, (field,)) or f"data.columns.{field}=<field of the rows>"
            remedy = "another reward, such as 'method.rewards={<module>.<function>: 1.0}'"
            if name == "regex":
                remedy = "'method.reward_pattern=\"<regular expression>\"'"
            raise UserError(
                f"method.rewards.{name}: reads the column {field!r}, but the rows of {key} have "
                f"only {', '.join(sorted(present))}. Use: {column}, or {remedy}."
            )
