"""The rows a run trains on and the ones it is measured on, from generated problems, local files or the hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, IterableDataset
from omegaconf import DictConfig, OmegaConf

from recipes.common import code_tasks
from recipes.common import data_select as select
from recipes.common.data_check import check_row, read_of
from recipes.common.data_files import asked_in, lines
from recipes.common.data_select import Row, spelled
from recipes.common.errors import UserError
from recipes.common.program import is_main_rank, say


def _reasoning(data: DictConfig, heldout_as_trained: bool = False) -> tuple[list[Row], list[Row]]:
    from recipes.common import tasks  # its import takes two seconds and reasoning-gym: a run on rows of its own does without either

    return tasks.generate(data, heldout_as_trained)


# Kind of data -> its training and held-out rows
GENERATED = {"reasoning": _reasoning, "code": code_tasks.generate}
TOKENIZER_ROWS = 10_000  # that a tokenizer is trained on: of a stream the first ones, of a large table evenly spread ones
LARGE_TABLE = 60_000  # rows; a smaller one is taken whole, as are the largest of conf/data
PIECE = 10_000  # rows in memory as Python's objects


@dataclass
class Loaded:
    """Rows to train on, and how many were left out on the way, by reason. Of a stream nothing is counted."""

    rows: Dataset | IterableDataset
    counts: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None  # of rows that were hashed before

    def sha256(self) -> dict[str, str]:
        """`data_sha256` of result.json; nothing of a stream, whose files record.json has by their hashes."""
        return {} if isinstance(self.rows, IterableDataset) else {"data_sha256": self.digest or rows_sha256(self.rows)}


def rows_sha256(rows: Dataset) -> str:
    """What json_sha256 gives of all rows in a list, which is never in memory."""
    pieces = (rows.select(range(at, min(at + PIECE, len(rows)))).to_list() for at in range(0, len(rows), PIECE))
    hashed = hashlib.sha256(b"[")
    for number, piece in enumerate(pieces):
        hashed.update((b", " if number else b"") + json.dumps(piece, sort_keys=True, default=str)[1:-1].encode())
    hashed.update(b"]")
    return hashed.hexdigest()


def load_train(data: DictConfig, method: str) -> Dataset | IterableDataset:
    """Rows to train on in the format of TRL's trainer for `method`, at most `data.limit` of them. Raises UserError."""
    return load(data, method).rows


def load(data: DictConfig, method: str, progress: Callable[[int], None] = lambda number: None) -> Loaded:
    """As load_train, with the counts. `progress` is given the number of rows that are read. Raises UserError."""
    if data.streaming:
        return Loaded(_stream(data, method))
    try:
        return _load(data, method, PIECE, progress)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, _OneTable):  # then all rows at once decide what their fields are
        return _load(data, method, sys.maxsize, progress)


class _OneTable(Exception):
    """Rows whose table has to be made of all of them at once."""


def _load(data: DictConfig, method: str, piece: int, progress: Callable[[int], None]) -> Loaded:
    """The rows in Arrow, made `piece` rows at a time: as Python's objects they would take several times the memory."""
    extra = ("task", "level") if data.curriculum != "none" else ()
    counts: dict[str, Any] = {"rows": 0}
    shares, blank, forms, tables = defaultdict[str, Counter[str]](Counter), Counter[str](), set(), []
    chosen = _chosen(data, method, counts, progress)
    while rows := list(itertools.islice(chosen, piece)):
        for row in rows:
            forms.add(_form(row, method))
            blank.update(name for name in read_of(row, method) if name in select.TEXT_FIELDS and select.is_blank(row[name]))
            for name in ("task", "level"):
                shares[name][str(row.get(name))] += 1
        _check_forms(forms, data.name, method)
        counts["rows"] += len(rows)
        tables.append(_table([_columns(row, method, extra) for row in rows], data.name, whole=piece == sys.maxsize))
    if not tables:
        raise UserError(f"data={data.name} has no rows to train on{_left_out(counts)}.")
    counts |= {f"by_{name}": dict(sorted(found.items(), key=str)) for name, found in shares.items() if set(found) != {"None"}}
    counts |= {"blank": dict(blank)} if blank else {}
    plain = [table.data.table.replace_schema_metadata() for table in tables]
    whole = tables[0] if len(tables) == 1 else Dataset(pyarrow.concat_tables(plain, promote_options="permissive"))
    return Loaded(whole, counts)


def _chosen(data: DictConfig, method: str, counts: dict[str, Any], progress: Callable[[int], None]) -> Iterator[Row]:
    """The rows to train on in their order, with what is left out added to `counts`. All are in memory where they are mixed or paired."""
    source = _read(data, method, counts)
    rows = select.without_duplicates(_left(source, data, counts, progress), data.deduplicate, counts)
    if data.sources:
        parts: list[list[Row]] = [[] for _ in data.sources]
        for row in rows:
            parts[row["source"]].append(row)
        _check_parts(data, parts)
        rows = iter(select.mixed(parts, [one.weight for one in data.sources], data.seed))
    if data.balance != "none":
        rows = iter(select.balanced(list(rows), data.balance, data.seed))
    if data.kind == "reasoning" and method == "dpo":
        rows = iter(_pairs(list(rows)[: data.limit], data.seed))
    yield from itertools.islice(rows, data.limit)
    for _ in rows:  # those past the limit are checked and counted
        pass


def _left(rows: Iterable[Row], data: DictConfig, counts: dict[str, Any], progress: Callable[[int], None]) -> Iterator[Row]:
    """Rows that data.filter and data.heldout_fraction leave."""
    refused_by, fraction, refused, number = select.row_filter(data.filter), data.heldout_fraction, Counter[str](), 0
    for number, row in enumerate(rows, start=1):
        if number % PIECE == 0:
            progress(number)
        reason = refused_by(row)
        if reason:
            refused[reason] += 1
        elif fraction and select.is_heldout(row, fraction):
            counts["held_out"] = counts.get("held_out", 0) + 1
        else:
            yield row
    counts |= {"read": number, **({"filtered": dict(refused)} if refused else {})}


def _table(rows: list[Row], name: str, whole: bool = True) -> Dataset:
    """Every field that a row has, null where others lack it: `from_list` alone takes those of the first row.

    Raises UserError, and _OneTable for rows that are not the `whole` and would not fit the others.
    """
    # Arguments of a call have other keys in every row, and a table's column has all of them in all rows, null where a row lacks one.
    loose = any(_calls_tools(value) for row in rows for value in row.values())
    if loose and not whole:
        raise _OneTable
    try:
        return Dataset.from_dict(
            {field: [row.get(field) for row in rows] for field in select.fields(rows)}, on_mixed_types="use_json" if loose else None
        )
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise UserError(
            f"data={name}: a field has values of two kinds in different rows ({error}). Write them alike, for example as text."
        ) from error
    except OverflowError as error:
        raise UserError(f"data={name}: a field has a whole number of more than 64 bits. Write it as text.") from error


def _calls_tools(value: Any) -> bool:
    """Whether it is messages that call tools."""
    return isinstance(value, list) and any(isinstance(message, dict) and message.get("tool_calls") for message in value)


def load_heldout_table(data: DictConfig, method: str) -> Dataset:
    """Rows that are never trained on, in the format of TRL's trainer for `method`. Raises UserError where there are none."""
    rows = load_heldout(data, method)
    if data.kind == "reasoning" and method == "dpo":
        rows = _pairs(rows, data.seed)
    _check_forms({_form(row, method) for row in rows}, data.name, method)
    return _table([_columns(row, method) for row in rows], data.name)


def load_heldout(data: DictConfig, method: str = "evaluate") -> list[Row]:
    """Rows that are never trained on, with the fields that `method` reads. Raises UserError where there are none.

    `data.limit` is of the rows that a method is about: of these for an evaluation, and a training's own, not those beside it.
    """
    if data.kind == "reasoning":
        rows = _reasoning(data, heldout_as_trained=method != "evaluate")[1]
    elif data.kind in GENERATED:
        rows = GENERATED[data.kind](data)[1]
    elif data.heldout_fraction:
        rows = list(_read(data, method, {}))
    elif data.kind == "jsonl":
        rows = read_jsonl(_given(data.heldout_path, "data.heldout_path"), method)
    else:
        rows = list(_hub(data, _given(data.heldout_split, "data.heldout_split"), method))
    if not rows:
        raise UserError(f"data={data.name} has no held-out rows: set data.num_heldout, data.heldout_path or data.heldout_split.")
    chosen = _left_by_filter(rows, data, method)
    if data.heldout_fraction:
        held_out = [row for row in chosen if select.is_heldout(row, data.heldout_fraction)]
        if not held_out:
            raise UserError(
                f"data.heldout_fraction={data.heldout_fraction} of {len(chosen)} rows: the held-out split is empty. "
                "Raise it, or give more rows; rows are held out by a hash of their question."
            )
        chosen = held_out
    if data.kind == "jsonl" and data.path and data.heldout_path and not data.streaming and is_main_rank():  # who says it
        known = asked_in(chosen, data.path)
        if known:
            say(
                f"warning: {known} of {len(chosen)} rows of data.heldout_path={data.heldout_path} ask what rows of data.path={data.path} "
                "ask, so their figures may show what was remembered. Remove them from one of the files, or use data.heldout_fraction in "
                "place of data.heldout_path."
            )
    return chosen[: data.limit] if data.limit and method == "evaluate" else chosen


def _left_by_filter(rows: list[Row], data: DictConfig, method: str) -> list[Row]:
    """Held-out rows that data.filter leaves. Raises UserError where it leaves none."""
    refused_by = select.row_filter(data.filter, questions=method in ("evaluate", "grpo"))
    reasons = [refused_by(row) for row in rows]
    chosen = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    if not chosen:
        raise UserError(
            f"data.filter leaves none of {len(rows)} held-out rows: {dict(Counter(reasons))}. Loosen it, or hold other rows out."
        )
    return chosen


def read_jsonl(path: str, method: str) -> list[Row]:
    """The rows of a local file. Raises UserError, with the line's number, for a line that is no JSON object or lacks a field."""
    return list(lines(path, method))


def columns(rows: Dataset | IterableDataset) -> list[str]:
    """The fields of the rows; of a stream those of the first one."""
    return list(rows.column_names or next(iter(rows)))


def texts(rows: Iterable[Row]) -> list[str]:
    """Everything a tokenizer of these rows has to spell: message contents and plain strings, in order."""
    if isinstance(rows, IterableDataset):
        rows = itertools.islice(rows, TOKENIZER_ROWS)
    elif isinstance(rows, Dataset) and len(rows) > LARGE_TABLE:
        rows = rows.select(range(0, len(rows), len(rows) // TOKENIZER_ROWS))
    return [text for row in rows for name in select.TEXT_FIELDS for text in spelled(row.get(name) or [])]


def _read(data: DictConfig, method: str, counts: dict[str, Any]) -> Iterable[Row]:
    """All rows of the source, of a mix each with the number of its own as `source`."""
    if data.kind in GENERATED:
        return GENERATED[data.kind](data)[0]
    if data.kind == "samples":
        files = [_given(data.path, "data.path")]
        if "files" in data:  # of a directory; launch/files/samples.py has listed them
            files = data.files
            say(f"data.path={data.path}: {len(files)} file(s) of samples")
        of_files = itertools.chain.from_iterable(lines(file, "samples") for file in files)
        rows, skipped = select.pairs_of_samples(of_files, data.pairs_per_prompt, data.pairs_of_any)
        if not rows:
            raise UserError(
                f"data.path={data.path}: no preference pair: {dict(skipped) or 'no samples'}. A pair needs two different answers to a "
                "prompt with different scores: sample more of each, or at a higher temperature."
            )
        counts["prompts_without_pair"] = dict(skipped)
        return rows
    if data.sources:
        return ({**row, "source": n} for n, one in enumerate(_sources(data)) for row in _rows(one, method))
    return _rows(data, method)


def _sources(data: DictConfig) -> list[DictConfig]:
    """Each source of a mix as a data set of its own."""
    named = [{key: value for key, value in source.items() if key != "weight"} for source in data.sources]
    return [OmegaConf.merge(data, {"kind": "jsonl" if one["path"] else "hub", "sources": []}, one) for one in named]


def _rows(data: DictConfig, method: str) -> Iterator[Row]:
    if data.kind == "jsonl":
        return lines(_given(data.path, "data.path"), method)
    return _hub(data, data.split, method)


def _stream(data: DictConfig, method: str) -> IterableDataset:
    """Rows as they are needed, without an end: a resumed run passes over those it has seen, however often they were repeated."""
    limit = {"limit": None} if data.sources else {}  # of the mix, not of each source
    parts_of: list[Any] = [OmegaConf.to_container(OmegaConf.merge(one, limit)) for one in (_sources(data) or [data])]
    parts = [IterableDataset.from_generator(_streamed, gen_kwargs={"data": one, "method": method}).repeat(None) for one in parts_of]
    if data.sources:
        _check_forms({_form(next(_streamed(one, method)), method) for one in parts_of}, data.name, method)
    total = sum(source.weight for source in data.sources)  # 1, but for digits: NumPy allows fewer than launch/rules/data.py
    weights = [source.weight / total for source in data.sources]
    whole = datasets.interleave_datasets(parts, weights, seed=data.seed) if data.sources else parts[0]
    if data.sources and data.limit:
        whole = whole.take(data.limit).repeat(None)
    return whole.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)


def _streamed(data: dict[str, Any], method: str) -> Iterator[Row]:
    """One pass over a source. Raises UserError where no row is left: the stream would look for one for ever; and for rows of two forms."""
    config, number, form = OmegaConf.create(data), 0, None
    refused_by, fraction, limit = select.row_filter(config.filter), config.heldout_fraction, config.limit
    for row in lines(config.path, method) if config.kind == "jsonl" else _hub(config, config.split, method, streaming=True):
        if refused_by(row) or (fraction and select.is_heldout(row, fraction)):
            continue
        number += 1
        kept = _columns(row, method)
        form = form or _form(kept, method)
        _check_forms({form, _form(kept, method)}, config.name, method)
        yield kept
        if number == limit:
            return
    if not number:
        raise UserError(f"data={config.name}: the stream has no rows to train on. Loosen data.filter, or name another source.")


def _form(row: Row, method: str) -> str:
    """What of a row its trainer reads, and whether that is text or messages."""
    given = {field: row[field] for field in read_of(row, method) if field != "tools"}  # which some may have
    return " and ".join(
        field if isinstance(value, dict) else f"{field} ({'text' if isinstance(value, str) else 'messages'})"
        for field, value in given.items()
    )


def _check_forms(forms: set[str], name: str, method: str) -> None:
    """A trainer takes the form of the first row for that of all. Raises UserError for several."""
    if len(forms) > 1:
        raise UserError(
            f"data={name}: some rows have {', others '.join(sorted(forms))}. Give all rows of a {method} the same fields, all of them text "
            "or all messages."
        )


def _check_parts(data: DictConfig, parts: list[list[Row]]) -> None:
    for source, part in zip(data.sources, parts, strict=True):
        if not part:
            raise UserError(f"data.sources: no row of {source.path or source.hub_id} is left to mix. Loosen data.filter, or leave it out.")


def _hub(data: DictConfig, split: str, method: str, streaming: bool = False) -> Iterator[Row]:
    for number, row in enumerate(_hub_dataset(data, split, streaming)):
        check_row(row, f"{data.hub_id}, split {split}, row {number}", method)
        yield row


def _hub_dataset(data: DictConfig, split: str, streaming: bool = False) -> Any:
    if data.hub_id is None or data.revision is None:
        raise UserError("data=hub needs data.hub_id and data.revision (a commit, so that the rows stay the same).")
    try:
        return datasets.load_dataset(data.hub_id, revision=data.revision, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"data set {data.hub_id} at {data.revision}, split {split}, could not be had: {error}") from error


def _pairs(problems: list[Row], seed: int) -> list[Row]:
    """Preference pairs: the right answer, and a wrong one that is right for another problem of the task, after the same working."""
    from recipes.common import tasks

    rng, of_task = random.Random(seed), defaultdict(list)
    for problem in problems:
        of_task[problem["task"]].append(problem)
    wrong = [tasks.wrong_answer(problem, of_task[problem["task"]], rng) for problem in problems]
    pairs = []
    for problem, answer in zip(problems, wrong, strict=True):
        before = problem["completion"][0]["content"].removesuffix(problem["answer"])
        pairs.append({**problem, "chosen": problem["completion"], "rejected": [{"role": "assistant", "content": before + answer}]})
    return pairs


def _columns(row: Row, method: str, extra: tuple[str, ...] = ()) -> Row:
    """What the trainer reads; for grpo everything but the right completion, because rewards may read any column."""
    if method == "sft" and "finished" in row:  # of a sample: where it was cut off, its end is not trained on
        extra = (*extra, "finished")
    if method == "grpo":
        return {key: value for key, value in row.items() if key not in ("completion", "source")}
    kept = {key: row[key] for key in (*read_of(row, method), *extra) if key in row}
    if not isinstance(kept.get("tools", ""), str):
        kept["tools"] = json.dumps(kept["tools"], ensure_ascii=False)  # TRL reads it so; a table would give each the keys of all others
    return kept


def _left_out(counts: dict[str, Any]) -> str:
    said = {key: value for key, value in counts.items() if key != "rows" and value}
    return ": " + ", ".join(f"{key} {value}" for key, value in said.items()) if said else ""


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise UserError(f"{name} is empty, and this data set needs it.")
    return value
