"""Load training and held-out rows: generated problems, local files, samples or the hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, IterableDataset
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_lines import MAX_ROW, TOO_LARGE, json_rows
from launch.core.row_check import (
    check_forms,
    check_row,
    conformed,
    form_of,
    row_problem,
    trainer_fields,
)
from launch.core.row_columns import mapped, mapping_of
from launch.core.row_formats import TEMPLATE_FIELDS
from launch.core.row_messages import message_texts, without_nulls
from recipes.data import code_tasks
from recipes.data import data_select as select
from recipes.data.data_select import Row
from recipes.data.data_table import make_table, message_keys
from recipes.rank.program import is_main_rank, say


def _reasoning(data: DictConfig, training_format: bool = False) -> tuple[list[Row], list[Row]]:
    from recipes.data import tasks  # takes two seconds to import

    return tasks.generate(data, heldout_in_training_format=training_format)


# Kind of data -> a function that returns training and held-out rows
GENERATED = {"reasoning": _reasoning, "code": code_tasks.generate}
# A tokenizer is trained on the first rows of a stream, or on evenly spaced rows of a large table.
TOKENIZER_ROWS, LARGE_TABLE = 10_000, 60_000
CHUNK = 10_000  # rows converted to Arrow at a time


@dataclass
class Loaded:
    """The training rows, and how many rows were omitted for each reason (unknown for streams)."""

    rows: Dataset | IterableDataset
    counts: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None  # the rows' sha256, if already computed

    def sha256(self) -> dict[str, str]:
        """Return `data_sha256` for result.json. A stream has {}, since its files are recorded."""
        if isinstance(self.rows, IterableDataset):
            return {}
        return {"data_sha256": self.digest or rows_sha256(self.rows)}


def rows_sha256(rows: Dataset) -> str:
    """Return json_sha256 of the list of all rows, without holding that list in memory."""
    digest = hashlib.sha256(b"[")
    for start in range(0, len(rows), CHUNK):
        chunk = rows.select(range(start, min(start + CHUNK, len(rows)))).to_list()
        text = json.dumps(chunk, sort_keys=True, default=str)[1:-1]
        digest.update((b", " if start else b"") + text.encode())
    digest.update(b"]")
    return digest.hexdigest()


def load(
    data: DictConfig, method: str, progress: Callable[[int], None] = lambda number: None
) -> Loaded:
    """Load at most `data.limit` training rows in TRL's format for `method`.

    `progress` is called with the number of rows read so far. Raises UserError if there are no rows,
    or for a row that `method` cannot use.
    """
    if data.streaming:
        return Loaded(_stream(data, method))
    try:
        return _load(data, method, CHUNK, progress)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return _load(data, method, sys.maxsize, progress)  # infer the types from all rows at once


def _load(data: DictConfig, method: str, chunk: int, progress: Callable[[int], None]) -> Loaded:
    """Load `chunk` rows at a time into Arrow, which takes less memory than Python objects."""
    extra = ("task", "level") if data.curriculum != "none" else ()
    counts: dict[str, Any] = {"rows": 0}
    shares: dict[str, Counter[str]] = {"task": Counter(), "level": Counter()}
    blank, forms, keys, tables = Counter[str](), set[str](), set[Any](), []
    training_rows = _training_rows(data, method, counts, progress)
    while rows := list(itertools.islice(training_rows, chunk)):
        if not forms:  # generated rows are not checked yet, and are all alike
            check_row(rows[0], f"data={data.name}", method)
        for row in rows:
            forms.add(form_of(row, method))
            texts = [name for name in trainer_fields(row, method) if name in select.TEXT_FIELDS]
            blank.update(name for name in texts if select.is_blank(row[name]))
            for name, share in shares.items():
                share[str(row.get(name))] += 1
        check_forms(forms, f"data={data.name}", method)
        counts["rows"] += len(rows)
        columns = [_columns(row, method, extra) for row in rows]
        keys |= message_keys(columns)
        tables.append(make_table(columns, data.name, keys, is_complete=chunk == sys.maxsize))
    select.require(tables, f"data={data.name}", {key: n for key, n in counts.items() if n})
    for name, share in shares.items():
        if set(share) != {"None"}:
            counts[f"by_{name}"] = dict(sorted(share.items(), key=str))
    if blank:
        counts["blank"] = dict(blank)
    if len(tables) == 1:
        return Loaded(tables[0], counts)
    plain = [table.data.table.replace_schema_metadata() for table in tables]
    return Loaded(Dataset(pyarrow.concat_tables(plain, promote_options="permissive")), counts)


def _training_rows(
    data: DictConfig, method: str, counts: dict[str, Any], progress: Callable[[int], None]
) -> Iterator[Row]:
    """Yield the training rows in order, and count omitted rows. A mix is held in memory."""
    rows = _training_split(_read(data, method, counts), data, counts, progress)
    rows = select.without_duplicates(rows, data.deduplicate, counts)
    if data.sources:
        parts: list[list[Row]] = [[] for _ in data.sources]
        for row in rows:
            parts[row["source"]].append(row)
        for source, part in zip(data.sources, parts, strict=True):
            select.require(part, f"data.sources: {source.path or source.hub_id}")
        rows = iter(select.mix(parts, [source.weight for source in data.sources], data.seed))
    if data.balance != "none":
        rows = iter(select.balance(list(rows), data.balance, data.seed))
    if data.kind == "reasoning" and method == "dpo":
        rows = iter(select.pairs_of_problems(list(rows)[: data.limit], data.seed))
    yield from itertools.islice(rows, data.limit)
    for _ in rows:  # check and count the rows beyond the limit
        pass


def _training_split(
    rows: Iterable[Row], data: DictConfig, counts: dict[str, Any], progress: Callable[[int], None]
) -> Iterator[Row]:
    """Yield rows of the training split that pass data.filter, and count the others."""
    rejecting_filter, fraction = select.row_filter(data.filter), data.heldout_fraction
    filtered, number = Counter[str](), 0
    for number, row in enumerate(rows, start=1):
        if number % CHUNK == 0:
            progress(number)
        if reason := rejecting_filter(row):
            filtered[reason] += 1
        elif fraction and select.is_heldout(row, fraction):
            counts["held_out"] = counts.get("held_out", 0) + 1
        else:
            yield row
    counts["read"] = number
    if filtered:
        counts["filtered"] = dict(filtered)


def load_heldout_table(data: DictConfig, method: str) -> Dataset:
    """Load the held-out rows in TRL's format for `method`. Raises UserError if there are none."""
    rows = load_heldout(data, method)
    if data.kind == "reasoning" and method == "dpo":
        rows = select.pairs_of_problems(rows, data.seed)
    check_forms({form_of(row, method) for row in rows}, f"data={data.name}", method)
    columns = [_columns(row, method) for row in rows]
    return make_table(columns, data.name, message_keys(columns))


def load_heldout(data: DictConfig, method: str = "evaluate") -> list[Row]:
    """Load the held-out rows. Raises UserError if there are none.

    `data.limit` applies only to method=evaluate.
    """
    if data.kind in GENERATED:
        options = {"training_format": method != "evaluate"} if data.kind == "reasoning" else {}
        rows = _with_system_prompt(GENERATED[data.kind](data, **options)[1], data)
    elif data.heldout_fraction:
        rows = list(_read(data, method, {}))
    elif data.kind == "jsonl":
        rows = list(lines(data.heldout_path, data, method))
    else:
        rows = list(_hub(data, data.heldout_split, method, {}))
    rejecting_filter = select.row_filter(data.filter, questions=method in ("evaluate", "grpo"))
    reasons = [rejecting_filter(row) for row in rows]
    chosen = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    omitted = Counter(reason for reason in reasons if reason)
    select.require(chosen, f"data={data.name}, held-out rows after data.filter", omitted)
    if fraction := data.heldout_fraction:
        number = len(chosen)
        chosen = [row for row in chosen if select.is_heldout(row, fraction)]
        select.require(chosen, f"data.heldout_fraction={fraction} of {number} rows")
    two_files = data.kind == "jsonl" and data.path and data.heldout_path and not data.streaming
    if two_files and is_main_rank() and (shared := select.num_shared(chosen, data, method)):
        say(
            f"warning: data.heldout_path={data.heldout_path}: {shared} of {len(chosen)} questions "
            f"are also in data.path={data.path}, so results may measure memorization. Remove them "
            "from one of the files, or replace data.heldout_path by data.heldout_fraction."
        )
    return chosen[: data.limit] if data.limit and method == "evaluate" else chosen


def lines(path: str, data: DictConfig, method: str) -> Iterator[Row]:
    """Yield the rows of a file. Raises UserError for the first row that `method` cannot use."""
    return _checked(mapped(json_rows(Path(path)), data, method), method)


def _checked(rows: Iterable[tuple[str, Row]], method: str) -> Iterator[Row]:
    for where, row in rows:
        row = conformed(row, method)
        check_row(row, where, method)
        yield row


def columns(rows: list[Row] | Dataset | IterableDataset) -> list[str]:
    """Return the fields of the rows; for a stream, of the first row only."""
    if isinstance(rows, list):
        return select.fields(rows)
    return list(rows.column_names or next(iter(rows)))


def run_texts(config: DictConfig) -> list[str]:
    """Return the texts that the tokenizer of a run's random weights is trained on."""
    return texts(load(config.data, config.method.rows).rows)


def texts(rows: Iterable[Row]) -> list[str]:
    """Return the texts of the rows that a tokenizer is trained on."""
    if isinstance(rows, IterableDataset):
        rows = itertools.islice(rows, TOKENIZER_ROWS)
    elif isinstance(rows, Dataset) and len(rows) > LARGE_TABLE:
        rows = rows.select(range(0, len(rows), len(rows) // TOKENIZER_ROWS))
    values = (row.get(name) or [] for row in rows for name in select.TEXT_FIELDS)
    return [text for value in values for text in message_texts(value)]


def _read(data: DictConfig, method: str, counts: dict[str, Any]) -> Iterable[Row]:
    """Read all rows. In a mix, `source` of each row is the index of its source."""
    if data.kind in GENERATED:
        return _with_system_prompt(GENERATED[data.kind](data)[0], data)
    if data.kind == "samples":
        files = data.get("files", [data.path])  # from launch/inputs/sample_files.py if a directory
        samples = itertools.chain.from_iterable(lines(file, data, "samples") for file in files)
        rows, skipped = select.pairs_of_samples(samples, data.pairs_per_prompt, data.pairs_of_any)
        remedy = (
            "A pair needs two answers to a prompt that differ in text and score. Sample more "
            "answers, or raise the temperature."
        )
        select.require(rows, f"data.path={data.path}", skipped, remedy)
        counts["prompts_without_pair"] = dict(skipped)
        return rows
    if data.sources:
        sources = enumerate(separate_sources(data))
        parts = ((n, _rows(source, method, counts)) for n, source in sources)
        return ({**row, "source": n} for n, rows in parts for row in rows)
    return _rows(data, method, counts)


def _with_system_prompt(problems: list[Row], data: DictConfig) -> list[Row]:
    return [row for _, row in mapped((("", problem) for problem in problems), data, None)]


def separate_sources(data: DictConfig) -> list[DictConfig]:
    """Return each source of a mix as a separate data configuration."""
    return [
        OmegaConf.merge(
            data,
            {"kind": "jsonl" if source.path else "hub", "sources": []},
            {k: v for k, v in source.items() if k != "weight"},
            mapping_of(data, source),
        )
        for source in data.sources
    ]


def _rows(
    data: DictConfig, method: str, counts: dict[str, Any], streaming: bool = False
) -> Iterator[Row]:
    if data.kind == "jsonl":
        return lines(data.path, data, method)
    return _hub(data, data.split, method, counts, streaming)


def _stream(data: DictConfig, method: str) -> IterableDataset:
    """Return an endless stream. A resumed run skips the rows it has seen, including repetitions."""
    limit = {"limit": None} if data.sources else {}  # data.limit applies to the mix
    sources: list[Any] = [
        OmegaConf.to_container(OmegaConf.merge(source, limit))
        for source in (separate_sources(data) or [data])
    ]
    streams = [
        IterableDataset.from_generator(_one_pass, gen_kwargs={"data": source, "method": method})
        for source in sources
    ]
    streams = [stream.repeat(None) for stream in streams]
    stream = streams[0]
    if data.sources:
        forms = {form_of(next(_one_pass(source, method)), method) for source in sources}
        check_forms(forms, f"data={data.name}", method)
        # Normalize, since NumPy accepts less rounding of the sum than launch/rules/data.py.
        total = sum(source.weight for source in data.sources)
        weights = [source.weight / total for source in data.sources]
        stream = datasets.interleave_datasets(streams, weights, seed=data.seed)
        if data.limit:
            stream = stream.take(data.limit).repeat(None)
    return stream.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)


def _one_pass(data: dict[str, Any], method: str) -> Iterator[Row]:
    """Yield the rows of a source once. Raises UserError for no rows, or for rows of two forms.

    Without rows, an endless stream would search for one forever.
    """
    config, form, counts = OmegaConf.create(data), None, {}
    rows = _rows(config, method, counts, streaming=True)
    rows = _training_split(rows, config, counts, lambda number: None)
    for row in itertools.islice(rows, config.limit):
        columns = _columns(row, method)
        form = form or form_of(columns, method)
        check_forms({form, form_of(columns, method)}, f"data={config.name}", method)
        yield columns
    select.require(form or (), f"data={config.name}", counts)


def _hub(
    data: DictConfig, split: str, method: str, counts: dict[str, Any], streaming: bool = False
) -> Iterator[Row]:
    """Yield the rows of a split. Later rows that `method` cannot use are omitted and counted."""
    rows = mapped(hub_rows(data, split, streaming), data, method)
    for number, (where, row) in enumerate(rows):
        row = conformed(row, method)
        if number == 0:
            check_row(row, where, method)
        elif problem := row_problem(row, method):
            unusable = counts.setdefault("unusable", Counter())
            if not unusable:
                say(f"warning: rows that {method} cannot use are omitted. {where}: {problem}")
            unusable[problem.partition(",")[0]] += 1
            continue
        if sum(map(len, texts([row]))) > MAX_ROW:  # lines of files are limited when they are read
            raise UserError(f"{where}: {TOO_LARGE}")
        yield row


def hub_rows(data: DictConfig, split: str, streaming: bool = False) -> Iterator[tuple[str, Row]]:
    try:
        rows = datasets.load_dataset(
            data.hub_id, data.subset, revision=data.revision, split=split, streaming=streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.hub_id={data.hub_id} at data.revision={data.revision}, split {split}, cannot be "
            f"loaded: {error}"
        ) from error
    for number, row in enumerate(rows):
        where = f"{data.hub_id}, split {split}, row {number}"
        names = (*select.TEXT_FIELDS, *TEMPLATE_FIELDS)
        fields = {*names, *(data.columns[name] for name in names if data.columns.get(name))}
        row |= {name: without_nulls(row[name]) for name in fields if name in row}
        yield where, row


def _columns(row: Row, method: str, extra: tuple[str, ...] = ()) -> Row:
    """Return the columns for the trainer. For grpo, keep those that rewards may read."""
    if method == "grpo":
        return {key: value for key, value in row.items() if key not in ("completion", "source")}
    if method == "sft":
        extra = (*extra, "finished")  # so that training does not learn ends of truncated samples
    columns = {key: row[key] for key in (*trainer_fields(row, method), *extra) if key in row}
    if not isinstance(columns.get("tools", ""), str):
        # TRL also reads JSON. In a column of objects, each tool would get the keys of all tools.
        columns["tools"] = json.dumps(columns["tools"], ensure_ascii=False)
    return columns
