"""The rows a run trains on and the ones it is measured on, from generated problems, local files or the hub."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
from recipes.common.files import json_sha256
from recipes.common.program import is_main_rank, say


def _reasoning(data: DictConfig, heldout_as_trained: bool = False) -> tuple[list[Row], list[Row]]:
    from recipes.common import tasks  # its import takes two seconds and reasoning-gym: a run on rows of its own does without either

    return tasks.generate(data, heldout_as_trained)


# Kind of data -> its training and held-out rows
GENERATED = {"reasoning": _reasoning, "code": code_tasks.generate}
TOKENIZER_ROWS = 10_000  # of a stream, that a tokenizer is trained on


@dataclass
class Loaded:
    """Rows to train on, and how many were left out on the way, by reason. Of a stream nothing is counted."""

    rows: Dataset | IterableDataset
    counts: dict[str, Any] = field(default_factory=dict)

    def sha256(self) -> dict[str, str]:
        """`data_sha256` of result.json; nothing of a stream, whose files record.json has by their hashes."""
        return {} if isinstance(self.rows, IterableDataset) else {"data_sha256": json_sha256(self.rows.to_list())}


def load_train(data: DictConfig, method: str) -> Dataset | IterableDataset:
    """Rows to train on in the format of TRL's trainer for `method`, at most `data.limit` of them. Raises UserError."""
    return load(data, method).rows


def load(data: DictConfig, method: str) -> Loaded:
    """As load_train, with the counts. Raises UserError."""
    if data.streaming:
        return Loaded(_stream(data, method))
    rows, counts = _read(data, method)
    counts["read"] = len(rows)
    kept, refused = [], Counter[str]()
    refused_by, fraction = select.row_filter(data.filter), data.heldout_fraction
    for row in rows:
        reason = refused_by(row)
        if reason:
            refused[reason] += 1
        elif fraction and select.is_heldout(row, fraction):
            counts["held_out"] = counts.get("held_out", 0) + 1
        else:
            kept.append(row)
    distinct = select.without_duplicates(kept, data.deduplicate)
    counts |= {"filtered": dict(refused)} if refused else {}
    counts |= {"duplicates": len(kept) - len(distinct)} if data.deduplicate != "none" else {}
    if data.sources:
        parts = [[row for row in distinct if row["source"] == n] for n in range(len(data.sources))]
        _check_parts(data, parts)
        distinct = select.mixed(parts, [source.weight for source in data.sources], data.seed)
    if data.balance != "none":
        distinct = select.balanced(distinct, data.balance, data.seed)
    rows = distinct[: data.limit] if data.limit else distinct
    if not rows:
        raise UserError(f"data={data.name} has no rows to train on{_left_out(counts)}.")
    if data.kind == "reasoning" and method == "dpo":
        rows = _pairs(rows, data.seed)
    extra = ("task", "level") if data.curriculum != "none" else ()
    counts["rows"] = len(rows)
    counts |= {f"by_{name}": _shares(rows, name) for name in ("task", "level") if name in rows[0]}
    blank = Counter(name for row in rows for name in read_of(row, method) if name in select.TEXT_FIELDS and select.is_blank(row[name]))
    counts |= {"blank": dict(blank)} if blank else {}
    _check_forms({_form(row, method) for row in rows}, data.name, method)
    return Loaded(_table([_columns(row, method, extra) for row in rows], data.name), counts)


def _table(rows: list[Row], name: str) -> Dataset:
    """Every field that a row has, null where others lack it: `from_list` alone takes those of the first row. Raises UserError."""
    try:
        # Arguments of a call have other keys in every row, and a table's column has all of them in all rows, null where a row lacks one.
        loose = any(_calls_tools(value) for row in rows for value in row.values())
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
        rows, _ = _read(data, method)
    elif data.kind == "jsonl":
        rows = read_jsonl(_given(data.heldout_path, "data.heldout_path"), method)
    else:
        rows = _hub(data, _given(data.heldout_split, "data.heldout_split"), method)
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
    """Everything a tokenizer of these rows has to spell: message contents and plain strings, in order. Of a stream the first rows."""
    first = itertools.islice(rows, TOKENIZER_ROWS) if isinstance(rows, IterableDataset) else rows
    return [text for row in first for name in select.TEXT_FIELDS for text in spelled(row.get(name) or [])]


def _read(data: DictConfig, method: str) -> tuple[list[Row], dict[str, Any]]:
    """All rows of the source, of a mix each with the number of its own as `source`."""
    if data.kind in GENERATED:
        return GENERATED[data.kind](data)[0], {}
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
        return rows, {"prompts_without_pair": dict(skipped)}
    if data.sources:
        return [{**row, "source": n} for n, one in enumerate(_sources(data)) for row in _rows(one, method)], {}
    return list(_rows(data, method)), {}


def _sources(data: DictConfig) -> list[DictConfig]:
    """Each source of a mix as a data set of its own."""
    named = [{key: value for key, value in source.items() if key != "weight"} for source in data.sources]
    return [OmegaConf.merge(data, {"kind": "jsonl" if one["path"] else "hub", "sources": []}, one) for one in named]


def _rows(data: DictConfig, method: str) -> Iterator[Row]:
    if data.kind == "jsonl":
        return lines(_given(data.path, "data.path"), method)
    return iter(_hub(data, data.split, method))


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
    for row in lines(config.path, method) if config.kind == "jsonl" else _hub_stream(config, method):
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


def _hub(data: DictConfig, split: str, method: str) -> list[Row]:
    rows = _hub_dataset(data, split).to_list()
    for number, row in enumerate(rows):
        check_row(row, f"{data.hub_id}, split {split}, row {number}", method)
    return rows


def _hub_stream(data: DictConfig, method: str) -> Iterator[Row]:
    for number, row in enumerate(_hub_dataset(data, data.split, streaming=True)):
        check_row(row, f"{data.hub_id}, split {data.split}, row {number}", method)
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


def _shares(rows: list[Row], name: str) -> dict[str, int]:
    return dict(sorted(Counter(str(row.get(name)) for row in rows).items(), key=str))


def _left_out(counts: dict[str, Any]) -> str:
    said = {key: value for key, value in counts.items() if key != "rows" and value}
    return ": " + ", ".join(f"{key} {value}" for key, value in said.items()) if said else ""


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise UserError(f"{name} is empty, and this data set needs it.")
    return value
