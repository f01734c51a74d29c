"""Load training and held-out rows: generated problems, local files, samples or the hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, IterableDataset
from omegaconf import DictConfig, OmegaConf

from launch.core.errors import UserError
from launch.core.json_lines import json_rows
from recipes.data import code_tasks
from recipes.data import data_select as select
from recipes.data.data_check import check_row, read_of
from recipes.data.data_select import Row, spelled
from recipes.rank.program import is_main_rank, say


def _reasoning(data: DictConfig, heldout_as_trained: bool = False) -> tuple[list[Row], list[Row]]:
    from recipes.data import tasks  # takes two seconds to import

    return tasks.generate(data, heldout_as_trained)


# Kind of data -> its training and held-out rows
GENERATED = {"reasoning": _reasoning, "code": code_tasks.generate}
TOKENIZER_ROWS = 10_000  # to train a tokenizer on: a stream's first, or spread over a large table
LARGE_TABLE = 60_000  # rows; tokenizers are trained on all rows of smaller tables
PIECE = 10_000  # rows in memory as Python objects at once


@dataclass
class Loaded:
    """Hold rows to train on, and how many were left out, by reason. Streams are not counted."""

    rows: Dataset | IterableDataset
    counts: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None  # of the rows, if they were already hashed

    def sha256(self) -> dict[str, str]:
        """Return `data_sha256` for result.json, or {} for a stream, whose files are recorded."""
        if isinstance(self.rows, IterableDataset):
            return {}
        return {"data_sha256": self.digest or rows_sha256(self.rows)}


def rows_sha256(rows: Dataset) -> str:
    """Return json_sha256 of the list of all rows, without holding that list in memory."""
    digest = hashlib.sha256(b"[")
    for start in range(0, len(rows), PIECE):
        piece = rows.select(range(start, min(start + PIECE, len(rows)))).to_list()
        text = json.dumps(piece, sort_keys=True, default=str)[1:-1]
        digest.update((b", " if start else b"") + text.encode())
    digest.update(b"]")
    return digest.hexdigest()


def load(
    data: DictConfig, method: str, progress: Callable[[int], None] = lambda number: None
) -> Loaded:
    """Load at most `data.limit` training rows in TRL's format for `method`, with counts.

    `progress` gets the number of rows read so far. Raises UserError.
    """
    if data.streaming:
        return Loaded(_stream(data, method))
    try:
        return _load(data, method, PIECE, progress)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return _load(data, method, sys.maxsize, progress)  # infer the types from all rows at once


def _load(data: DictConfig, method: str, piece: int, progress: Callable[[int], None]) -> Loaded:
    """Load rows into Arrow, `piece` at a time, since Python objects take several times as much."""
    extra = ("task", "level") if data.curriculum != "none" else ()
    counts: dict[str, Any] = {"rows": 0}
    shares: dict[str, Counter[str]] = {"task": Counter(), "level": Counter()}
    blank, forms, tables = Counter[str](), set[str](), []
    chosen = _chosen(data, method, counts, progress)
    while rows := list(itertools.islice(chosen, piece)):
        if not forms:  # generated rows have the fields of their kind, regardless of the method
            check_row(rows[0], f"data={data.name}", method)
        for row in rows:
            forms.add(_form(row, method))
            texts = [name for name in read_of(row, method) if name in select.TEXT_FIELDS]
            blank.update(name for name in texts if select.is_blank(row[name]))
            for name, share in shares.items():
                share[str(row.get(name))] += 1
        _check_forms(forms, data.name, method)
        counts["rows"] += len(rows)
        columns = [_columns(row, method, extra) for row in rows]
        tables.append(_table(columns, data.name, whole=piece == sys.maxsize))
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


def _chosen(
    data: DictConfig, method: str, counts: dict[str, Any], progress: Callable[[int], None]
) -> Iterator[Row]:
    """Yield the training rows in order and count omitted ones. Mixing holds all rows in memory."""
    left = _left(_read(data, method, counts), data, counts, progress)
    rows = select.without_duplicates(left, data.deduplicate, counts)
    if data.sources:
        parts: list[list[Row]] = [[] for _ in data.sources]
        for row in rows:
            parts[row["source"]].append(row)
        for source, part in zip(data.sources, parts, strict=True):
            select.require(part, f"data.sources: {source.path or source.hub_id}")
        rows = iter(select.mixed(parts, [source.weight for source in data.sources], data.seed))
    if data.balance != "none":
        rows = iter(select.balanced(list(rows), data.balance, data.seed))
    if data.kind == "reasoning" and method == "dpo":
        rows = iter(_pairs(list(rows)[: data.limit], data.seed))
    yield from itertools.islice(rows, data.limit)
    for _ in rows:  # rows past the limit are checked and counted
        pass


def _left(
    rows: Iterable[Row], data: DictConfig, counts: dict[str, Any], progress: Callable[[int], None]
) -> Iterator[Row]:
    """Yield the training rows: those that pass data.filter, without data.heldout_fraction."""
    rejecting_filter, fraction = select.row_filter(data.filter), data.heldout_fraction
    filtered, number = Counter[str](), 0
    for number, row in enumerate(rows, start=1):
        if number % PIECE == 0:
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


def _table(rows: list[Row], name: str, whole: bool = True) -> Dataset:
    """Return a table with the fields of all rows; `from_list` would take only the first row's.

    Raises UserError, and ArrowInvalid if the rest of the rows may not fit a table of these.
    """
    # The keys of tool calls' arguments differ by row; a column has all of them, with nulls.
    loose = any(
        isinstance(turn, dict) and turn.get("tool_calls")
        for row in rows
        for value in row.values()
        if isinstance(value, list)
        for turn in value
    )
    if loose and not whole:
        raise pyarrow.ArrowInvalid("arguments of tool calls")
    try:
        return Dataset.from_dict(
            {field: [row.get(field) for row in rows] for field in select.fields(rows)},
            on_mixed_types="use_json" if loose else None,
        )
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
        raise UserError(
            f"data={name}: no column holds all values of a field ({error}). Use one type of value "
            "in all rows, and integers of at most 64 bits. Write others as text."
        ) from error


def load_heldout_table(data: DictConfig, method: str) -> Dataset:
    """Load the held-out rows in TRL's format for `method`. Raises UserError if there are none."""
    rows = load_heldout(data, method)
    if data.kind == "reasoning" and method == "dpo":
        rows = _pairs(rows, data.seed)
    _check_forms({_form(row, method) for row in rows}, data.name, method)
    return _table([_columns(row, method) for row in rows], data.name)


def load_heldout(data: DictConfig, method: str = "evaluate") -> list[Row]:
    """Load the rows that are never trained on. Raises UserError if there are none.

    `data.limit` applies to the rows of an evaluation, but not to those held out of training.
    """
    if data.kind == "reasoning":
        rows = _reasoning(data, heldout_as_trained=method != "evaluate")[1]
    elif data.kind in GENERATED:
        rows = GENERATED[data.kind](data)[1]
    elif data.heldout_fraction:
        rows = list(_read(data, method, {}))
    elif data.kind == "jsonl":
        rows = list(lines(data.heldout_path, method))
    else:
        rows = list(_hub(data, data.heldout_split, method))
    rejecting_filter = select.row_filter(data.filter, questions=method in ("evaluate", "grpo"))
    reasons = [rejecting_filter(row) for row in rows]
    chosen = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    omitted = Counter(reason for reason in reasons if reason)
    select.require(chosen, f"data={data.name}, held-out rows after data.filter", omitted)
    if fraction := data.heldout_fraction:
        number = len(chosen)
        chosen = [row for row in chosen if select.is_heldout(row, fraction)]
        select.require(chosen, f"data.heldout_fraction={fraction} of {number} rows")
    files = data.kind == "jsonl" and data.path and data.heldout_path and not data.streaming
    if files and is_main_rank() and (known := select.num_known_questions(chosen, data.path)):
        say(
            f"warning: {known} of {len(chosen)} rows of data.heldout_path={data.heldout_path} have "
            f"questions of data.path={data.path}, so their figures may measure memorization. "
            "Remove them "
            "from one of the files, or use data.heldout_fraction instead."
        )
    return chosen[: data.limit] if data.limit and method == "evaluate" else chosen


def lines(path: str, method: str) -> Iterator[Row]:
    """Yield the rows of a file. Raises UserError for the first row that `method` cannot use."""
    for where, row in json_rows(Path(path)):
        check_row(row, where, method)
        yield row


def columns(rows: list[Row] | Dataset | IterableDataset) -> list[str]:
    """Return the fields of the rows; for a stream, those of the first row."""
    if isinstance(rows, list):
        return select.fields(rows)
    return list(rows.column_names or next(iter(rows)))


def texts(rows: Iterable[Row]) -> list[str]:
    """Return the texts to train a tokenizer of these rows on: message contents and strings."""
    if isinstance(rows, IterableDataset):
        rows = itertools.islice(rows, TOKENIZER_ROWS)
    elif isinstance(rows, Dataset) and len(rows) > LARGE_TABLE:
        rows = rows.select(range(0, len(rows), len(rows) // TOKENIZER_ROWS))
    return [
        text for row in rows for name in select.TEXT_FIELDS for text in spelled(row.get(name) or [])
    ]


def _read(data: DictConfig, method: str, counts: dict[str, Any]) -> Iterable[Row]:
    """Read all rows; in a mix, add to each row the index of its source as `source`."""
    if data.kind in GENERATED:
        return GENERATED[data.kind](data)[0]
    if data.kind == "samples":
        files = data.get("files", [data.path])  # launch/inputs/sample_files.py lists a directory's
        samples = itertools.chain.from_iterable(lines(file, "samples") for file in files)
        rows, skipped = select.pairs_of_samples(samples, data.pairs_per_prompt, data.pairs_of_any)
        remedy = (
            "A pair needs two answers to a prompt that differ in text and score. Sample more "
            "answers, or at a higher temperature."
        )
        select.require(rows, f"data.path={data.path}", skipped, remedy)
        counts["prompts_without_pair"] = dict(skipped)
        return rows
    if data.sources:
        sources = enumerate(_sources(data))
        return ({**row, "source": n} for n, source in sources for row in _rows(source, method))
    return _rows(data, method)


def _sources(data: DictConfig) -> list[DictConfig]:
    """Return each source of a mix as a separate data configuration."""
    return [
        OmegaConf.merge(
            data,
            {"kind": "jsonl" if source.path else "hub", "sources": []},
            {key: value for key, value in source.items() if key != "weight"},
        )
        for source in data.sources
    ]


def _rows(data: DictConfig, method: str, streaming: bool = False) -> Iterator[Row]:
    if data.kind == "jsonl":
        return lines(data.path, method)
    return _hub(data, data.split, method, streaming)


def _stream(data: DictConfig, method: str) -> IterableDataset:
    """Stream rows endlessly. A resumed run skips the rows it has seen, including repetitions."""
    limit = {"limit": None} if data.sources else {}  # the limit is that of the mix
    sources: list[Any] = [
        OmegaConf.to_container(OmegaConf.merge(source, limit))
        for source in (_sources(data) or [data])
    ]
    parts = [
        IterableDataset.from_generator(_streamed, gen_kwargs={"data": source, "method": method})
        for source in sources
    ]
    parts = [part.repeat(None) for part in parts]
    whole = parts[0]
    if data.sources:
        forms = {_form(next(_streamed(source, method)), method) for source in sources}
        _check_forms(forms, data.name, method)
        # Divide by the sum, since NumPy tolerates less rounding in it than launch/rules/data.py.
        total = sum(source.weight for source in data.sources)
        weights = [source.weight / total for source in data.sources]
        whole = datasets.interleave_datasets(parts, weights, seed=data.seed)
        if data.limit:
            whole = whole.take(data.limit).repeat(None)
    return whole.shuffle(seed=data.seed, buffer_size=data.shuffle_buffer)


def _streamed(data: dict[str, Any], method: str) -> Iterator[Row]:
    """Yield one pass over a source. Raises UserError if rows have two forms, or there are none.

    Without rows, a repeated stream would search for one forever.
    """
    config, form, counts = OmegaConf.create(data), None, {}
    rows = _left(_rows(config, method, streaming=True), config, counts, lambda number: None)
    for row in itertools.islice(rows, config.limit):
        columns = _columns(row, method)
        form = form or _form(columns, method)
        _check_forms({form, _form(columns, method)}, config.name, method)
        yield columns
    select.require(form or (), f"data={config.name}", counts)


def _form(row: Row, method: str) -> str:
    """Return the fields of a row that its trainer reads, and whether they are text or messages."""
    names = []
    for name in read_of(row, method):
        if not isinstance(row[name], (str, list)):
            names.append(name)
        elif name != "tools":  # optional in each row
            names.append(f"{name} ({'text' if isinstance(row[name], str) else 'messages'})")
    return " and ".join(names)


def _check_forms(forms: set[str], name: str, method: str) -> None:
    """Reject rows of several forms, because a trainer assumes that all have the first row's."""
    if len(forms) > 1:
        raise UserError(
            f"data={name}: some rows have {', others '.join(sorted(forms))}. Give all rows of "
            f"{method} the same fields, all of them text or all messages."
        )


def _hub(data: DictConfig, split: str, method: str, streaming: bool = False) -> Iterator[Row]:
    if data.revision is None:
        raise UserError(f"data.revision of {data.hub_id} is missing. Use: data.revision=<commit>.")
    try:
        rows = datasets.load_dataset(
            data.hub_id, revision=data.revision, split=split, streaming=streaming
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.hub_id={data.hub_id} at {data.revision}, split {split}: {error}"
        ) from error
    for number, row in enumerate(rows):
        check_row(row, f"{data.hub_id}, split {split}, row {number}", method)
        yield row


def _pairs(problems: list[Row], seed: int) -> list[Row]:
    """Return pairs of the right answer and another problem's, both after the right working."""
    from recipes.data import tasks

    rng, of_task = random.Random(seed), defaultdict(list)
    for problem in problems:
        of_task[problem["task"]].append(problem)
    pairs = []
    for problem in problems:
        wrong = tasks.wrong_answer(problem, of_task[problem["task"]], rng)
        working = problem["completion"][0]["content"].removesuffix(problem["answer"])
        rejected = [{"role": "assistant", "content": working + wrong}]
        pairs.append({**problem, "chosen": problem["completion"], "rejected": rejected})
    return pairs


def _columns(row: Row, method: str, extra: tuple[str, ...] = ()) -> Row:
    """Return the columns that the trainer reads; for grpo all but the completion, for rewards."""
    if method == "grpo":
        return {key: value for key, value in row.items() if key not in ("completion", "source")}
    if method == "sft":
        extra = (*extra, "finished")  # so that training does not teach truncated samples to end
    columns = {key: row[key] for key in (*read_of(row, method), *extra) if key in row}
    if not isinstance(columns.get("tools", ""), str):
        # TRL reads JSON too; in a table, each tool would get the keys of all others.
        columns["tools"] = json.dumps(columns["tools"], ensure_ascii=False)
    return columns
