"""Rows of check.py's table about data, the curriculum and the learning rate's scaling; and the files that data names."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path

from launch.errors import UserError, near
from launch.rules.rule import Rule
from launch.schema import Config
from launch.schema.data import Balance, Curriculum, CurriculumArgs, Deduplicate, LrScaling
from launch.schema.enums import Format, Mode
from launch.trainer_args import argument

TRAINS_ON_ROWS = ("sft", "dpo", "grpo")
ORDERED = ("sft", "grpo")  # methods with a curriculum
READ_BY = {"earlier": Curriculum.mixed, "floor": Curriculum.adaptive, "memory": Curriculum.adaptive}
NAMED = 8  # files of a directory, in an error
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")  # of data.filter, in tokens: trainings read them
LINES_READ = 10_000  # of a data file, for bytes that are no text: more would make a plan slow
HEAD = 65536  # bytes of it, for its format
# First bytes -> what the file is, and the command that makes JSONL of it ({old} and {new}), or a format of datasets.load_dataset.
BINARY = {
    b"\x1f\x8b": ("gzip-compressed", "gzip -dc {old} > {new}"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstd -dc {old} > {new}"),
    b"\xfd7zXZ": ("compressed by xz", "xz -dc {old} > {new}"),
    b"BZh": ("compressed by bzip2", "bzip2 -dc {old} > {new}"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unzip {old}, or save the spreadsheet as CSV"),
    b"PAR1": ("Parquet", "parquet"),
    b"\xff\xfe": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
    b"\xfe\xff": ("UTF-16 and not UTF-8", "iconv -f UTF-16 -t UTF-8 {old} > {new}"),
}
HEADER = re.compile(r'"?\w[\w ]*"?(?:([,;\t])"?\w[\w ]*"?)+')  # the first line of a CSV file: names
# Fields of other programs' rows -> what makes TRL's of them. recipes/common/data_check.py says it of any row.
RENAMINGS = {
    ("conversations",): "rename conversations to messages, in its turns from to role (human: user, gpt: assistant), value to content",
    ("instruction", "output"): "join instruction and input as prompt, and rename output to completion (sft) or answer (grpo, evaluate)",
}
KNOWN = {"prompt", "messages", "text", "chosen"}  # of which a row of every method has one
TOLERANCE = 1e-6  # of the sum of weights: 1/3 written with seven digits is one third


def _weights(config: Config) -> float:
    return sum(source.weight for source in config.data.sources)


def _faulty_source(config: Config) -> str | None:
    """What is wrong with the first source that has a fault."""
    for number, source in enumerate(config.data.sources):
        if (source.path is None) == (source.hub_id is None):
            return f"data.sources[{number}] has {'neither path nor hub_id' if source.path is None else 'path and hub_id'}"
        if not 0 < source.weight < math.inf:
            return f"data.sources[{number}].weight={source.weight:g}"
    return None


def _not_streamed(config: Config) -> str | None:
    """What needs all rows at once, or a number of steps that a stream does not give."""
    data = config.data
    if data.kind not in ("jsonl", "hub", "mix"):
        return f"data={data.name}"
    if data.deduplicate != Deduplicate.none:
        return f"data.deduplicate={data.deduplicate.value}"
    if data.balance != Balance.none:
        return f"data.balance={data.balance.value}"
    return f"data.curriculum={data.curriculum.value}" if data.curriculum != Curriculum.none else None


def _bad_regex(config: Config) -> str | None:
    for name, pattern in config.data.filter.regex.items():
        try:
            re.compile(pattern)
        except re.error as error:
            return f"data.filter.regex.{name}={pattern}: {error}"
    return None


def _unread_argument(config: Config) -> str | None:
    given, standard = config.data.curriculum_args, CurriculumArgs()
    changed = [name for name in READ_BY if getattr(given, name) != getattr(standard, name)]
    # Only grpo sees pass rates change on the way, and has some to remember.
    return next((n for n in changed if config.data.curriculum != READ_BY[n] or (n == "memory" and config.method.name != "grpo")), None)


def _share_out_of_range(config: Config) -> str | None:
    args = config.data.curriculum_args
    # A floor of 0 leaves no weight at all once every level is solved, or hopeless.
    return next((name for name in READ_BY if not 0 <= getattr(args, name) < 1 or (name == "floor" and args.floor == 0)), None)


def _unread_by_samples(config: Config) -> str | None:
    """What of `data` only trainings read, and sampling would ignore."""
    data, filters = config.data, config.data.filter
    if config.method.name != "sample" and config.method.kind != "cycles":
        return None
    given = {"data.streaming": data.streaming}
    given |= {f"data.filter.{n}": getattr(filters, n) is not None for n in LENGTHS}
    return next((key for key, is_given in given.items() if is_given), None)


def _steps(config: Config) -> int:
    return int(argument(config, "max_steps") or -1)


DATA_RULES = [
    Rule(
        "data_preview",
        lambda c: c.data.preview > 0 and c.method.name not in TRAINS_ON_ROWS,
        lambda c: f"data.preview={c.data.preview} with method={c.method.name}: it trains on no rows",
        lambda c: f"method={', '.join(TRAINS_ON_ROWS)}",
    ),
    Rule(
        "data_preview_alone",
        lambda c: c.data.preview > 0 and c.mode == Mode.run and c.format == Format.json,
        lambda c: f"data.preview={c.data.preview} with format=json: it prints rows for a person, and ends",
        lambda c: "data.preview=5 without format=json; data.json of a run holds the figures",
    ),
    Rule(
        "data_sources",
        lambda c: (c.data.kind == "mix") != bool(c.data.sources),
        lambda c: f"data={c.data.name} with {len(c.data.sources)} data.sources",
        lambda c: "data=mix 'data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]'",
    ),
    Rule(
        "data_source",
        lambda c: _faulty_source(c) is not None,
        lambda c: str(_faulty_source(c)),
        lambda c: "a path or a hub_id in each, and a weight above 0",
    ),
    Rule(
        "data_weights",
        lambda c: bool(c.data.sources) and abs(_weights(c) - 1) > TOLERANCE,
        lambda c: f"the weights of data.sources sum to {_weights(c):g}, and they are shares of the rows",
        lambda c: f"weights that sum to 1: {', '.join(f'{source.weight / (_weights(c) or 1):.4g}' for source in c.data.sources)}",
    ),
    Rule(
        "data_samples",
        lambda c: c.data.kind == "samples" and (c.method.name != "dpo" or not c.data.path),
        lambda c: f"data=samples with method={c.method.name} and data.path={c.data.path}: it makes preference pairs of a file of samples",
        lambda c: "method=dpo data=samples data.path=<run of method=sample>/scored.jsonl",
    ),
    Rule(
        "data_of_samples",
        lambda c: _unread_by_samples(c) is not None,
        lambda c: f"{_unread_by_samples(c)} with method={c.method.name}: prompts are drawn from all rows, and it would be ignored",
        lambda c: (
            f"data.curriculum, method.args.{'' if c.method.name == 'sample' else 'sample.'}num_prompts, and data.filter by fields; "
            "or leave it out"
        ),
    ),
    Rule(
        "data_pairs_number",
        lambda c: c.data.pairs_per_prompt < 1,
        lambda c: f"data.pairs_per_prompt={c.data.pairs_per_prompt}: no pairs",
        lambda c: "at least 1",
    ),
    Rule(
        "data_pairs",
        lambda c: (c.data.pairs_per_prompt != 1 or c.data.pairs_of_any) and c.data.kind != "samples",
        lambda c: (
            f"data.{'pairs_of_any=true' if c.data.pairs_of_any else f'pairs_per_prompt={c.data.pairs_per_prompt}'} "
            f"under data={c.data.name}: it would be ignored"
        ),
        lambda c: "data=samples",
    ),
    Rule(
        "data_streaming",
        lambda c: c.data.streaming and _not_streamed(c) is not None,
        lambda c: f"data.streaming=true with {_not_streamed(c)}: a stream is never seen whole",
        lambda c: "data.streaming=false, or data=jsonl or hub without it",
    ),
    Rule(
        "data_streaming_reference",
        lambda c: c.data.streaming and bool(argument(c, "precompute_ref_log_probs")),
        lambda c: "method.args.precompute_ref_log_probs=true with data.streaming=true: the reference measures all rows beforehand",
        lambda c: "data.streaming=false, or precompute_ref_log_probs=false",
    ),
    Rule(
        "data_streaming_steps",
        lambda c: c.data.streaming and c.method.kind == "trainer" and _steps(c) < 1,
        lambda c: "data.streaming=true without method.args.max_steps: a stream has no end",
        lambda c: "method.args.max_steps=1000",
    ),
    Rule(
        "shuffle_buffer",
        lambda c: c.data.shuffle_buffer != 1000 and not c.data.streaming,
        lambda c: f"data.shuffle_buffer={c.data.shuffle_buffer} without data.streaming: all rows are shuffled, and it would be ignored",
        lambda c: "data.streaming=true",
    ),
    Rule(
        "heldout_fraction",
        lambda c: c.data.heldout_fraction is not None and not 0 < c.data.heldout_fraction < 1,
        lambda c: f"data.heldout_fraction={c.data.heldout_fraction}: one of both splits would be empty",
        lambda c: "a share above 0 and below 1, for example 0.1",
    ),
    Rule(
        "heldout_twice",
        lambda c: (
            bool(c.data.heldout_fraction)
            and bool(c.data.kind in ("reasoning", "code", "samples") or c.data.heldout_path or c.data.heldout_split)
        ),
        lambda c: f"data.heldout_fraction={c.data.heldout_fraction} with data={c.data.name}, which has held-out rows of its own or none",
        lambda c: "data.num_heldout (reasoning, code), or one of data.heldout_path, data.heldout_split and data.heldout_fraction",
    ),
    Rule(
        "filter_regex",
        lambda c: _bad_regex(c) is not None,
        lambda c: f"{_bad_regex(c)}",
        lambda c: "a regular expression of Python's re",
    ),
    Rule(
        "filter_lengths",
        lambda c: (c.data.filter.min_tokens or 0) > (math.inf if c.data.filter.max_tokens is None else c.data.filter.max_tokens),
        lambda c: f"data.filter.min_tokens={c.data.filter.min_tokens} above max_tokens={c.data.filter.max_tokens}: no row is left",
        lambda c: f"data.filter.min_tokens={c.data.filter.max_tokens} data.filter.max_tokens={c.data.filter.min_tokens}",
    ),
    Rule(
        "chat_template_twice",
        lambda c: c.model.chat_template is not None and c.data.chat_template is not None,
        lambda c: f"model.chat_template={c.model.chat_template} and data.chat_template={c.data.chat_template}: one would be ignored",
        lambda c: "one of them",
    ),
    Rule(
        "curriculum_method",
        lambda c: c.data.curriculum != Curriculum.none and c.method.kind == "trainer" and c.method.name not in ORDERED,
        lambda c: f"data.curriculum={c.data.curriculum.value} with method={c.method.name}: it takes rows as they are",
        lambda c: f"method={', '.join(ORDERED)}, sample or raft, or data.curriculum=none",
    ),
    Rule(
        "curriculum_steps",
        lambda c: c.data.curriculum != Curriculum.none and c.method.name in ORDERED and _steps(c) < 1,
        lambda c: f"data.curriculum={c.data.curriculum.value} without method.args.max_steps: its stages are parts of the run",
        lambda c: "method.args.max_steps=1000",
    ),
    Rule(
        "curriculum_packing",
        lambda c: c.data.curriculum != Curriculum.none and bool(argument(c, "packing")),
        lambda c: f"data.curriculum={c.data.curriculum.value} with method.args.packing=true: a packed row has many levels",
        lambda c: "method.args.packing=false",
    ),
    Rule(
        "packing_length",
        lambda c: bool(argument(c, "packing")) and argument(c, "max_length") is None,
        lambda c: "method.args.packing=true with max_length=null: rows are packed up to max_length",
        lambda c: "method.args.max_length=1024, or method.args.packing=false",
    ),
    Rule(
        "curriculum_pass_rates",
        lambda c: c.data.curriculum == Curriculum.adaptive and c.method.name == "sft" and not c.data.pass_rates,
        lambda c: "data.curriculum=adaptive with method=sft: nothing is generated, so no pass rates are measured on the way",
        lambda c: "data.pass_rates=<result.json of an evaluation>, or data.curriculum=progressive",
    ),
    Rule(
        "pass_rates_unused",
        lambda c: bool(c.data.pass_rates) and c.data.curriculum != Curriculum.adaptive,
        lambda c: f"data.pass_rates={c.data.pass_rates} with data.curriculum={c.data.curriculum.value}: it would be ignored",
        lambda c: "data.curriculum=adaptive",
    ),
    Rule(
        "curriculum_args_unused",
        lambda c: _unread_argument(c) is not None,
        lambda c: (
            f"data.curriculum_args.{_unread_argument(c)} with data.curriculum={c.data.curriculum.value} and method={c.method.name}: "
            "it would be ignored"
        ),
        lambda c: f"data.curriculum={READ_BY[str(_unread_argument(c))].value}{' with method=grpo' * (_unread_argument(c) == 'memory')}",
    ),
    Rule(
        "curriculum_args",
        lambda c: _share_out_of_range(c) is not None,
        lambda c: (
            f"data.curriculum_args.{_share_out_of_range(c)}={getattr(c.data.curriculum_args, str(_share_out_of_range(c))):g}: a share"
        ),
        lambda c: "at least 0 (floor: above 0) and below 1",
    ),
    Rule(
        "lr_scaling",
        lambda c: (c.method.lr_scaling != LrScaling.none) != (c.method.lr_reference_batch is not None),
        lambda c: f"method.lr_scaling={c.method.lr_scaling.value} with method.lr_reference_batch={c.method.lr_reference_batch}",
        lambda c: "both, for example method.lr_scaling=sqrt method.lr_reference_batch=32, or none of them",
    ),
    Rule(
        "lr_scaling_unused",
        lambda c: c.method.lr_scaling != LrScaling.none and c.method.kind != "trainer",
        lambda c: f"method.lr_scaling={c.method.lr_scaling.value} with method={c.method.name}: it has no learning rate of its own",
        lambda c: "method.lr_scaling=none",
    ),
]


def named_files(config: Config) -> dict[str, str]:
    """Key -> file, of those that data and templates name beside data.path and data.heldout_path."""
    found = {f"data.sources[{n}].path": source.path for n, source in enumerate(config.data.sources)}
    found |= {"model.chat_template": config.model.chat_template, "data.chat_template": config.data.chat_template}
    found |= {"data.pass_rates": config.data.pass_rates}
    found |= {"data.path": config.data.path} if config.data.kind == "samples" else {}
    return {key: path for key, path in found.items() if path}


def check_is_file(key: str, path: Path) -> None:
    """Raises UserError where there is no file at `path`, with the names of those that it may have been."""
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.jsonl"))
        named = f" It has {', '.join(inside[:NAMED])}{', ...' if len(inside) > NAMED else ''}." if inside else ""
        raise UserError(f"{key}={path}: a directory, and one file is needed.{named}")
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{key}={path}: no such file.{near(path.name, beside)}")
    if key in ("data.path", "data.heldout_path") or key.startswith("data.sources["):
        _check_rows(path)


def _check_rows(path: Path) -> None:
    """Raises UserError for a file of rows that is no JSONL or no UTF-8, or whose first row has another program's fields."""
    number = 0
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            other = _other_format(head, path)
            file.seek(0)
            for line in itertools.islice(file, 0 if other else LINES_READ):
                number += 1
                line.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: not UTF-8: byte 0x{error.object[error.start]:02x} at place {error.start + 1}, as Latin-1 or Windows-1252 "
            f"has it. Use: iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(_beside(path)))}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    if other:
        raise UserError(f"{path}:1: {other[0]}, and a JSONL file has one JSON object a line. Use: {other[1]}")
    try:
        row = json.loads(head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):  # whoever reads the rows says it with its column
        return
    names = row.keys() if isinstance(row, dict) else set()
    how = next((how for fields, how in RENAMINGS.items() if names.isdisjoint(KNOWN) and names >= set(fields)), None)
    if how:
        raise UserError(f"{path}:1: has {', '.join(names)}, and rows have other fields here. Use: {how}.")


def _other_format(head: bytes, path: Path) -> tuple[str, str] | None:
    """(what a file is, the command that makes JSONL of it) by its first bytes; None where they may be JSONL's."""
    old, new = str(path), str(_beside(path))
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().decode(errors="replace").partition("\n")[0].strip()
    header = HEADER.fullmatch(line)
    found, options = next((kind for start, kind in BINARY.items() if head.startswith(start)), None), ""
    if line.startswith("["):
        found = "a JSON list", "json"
    elif line == "{":
        found = "a JSON object over several lines", "json"
    elif found is None and line and not line.startswith("{") and (header or path.suffix in (".csv", ".tsv")):
        found, options = ("CSV by its first line", "csv"), f", sep={json.dumps(header[1])}" if header and header[1] != "," else ""
    if found is None:
        return None
    what, how = found
    if how.isalpha():
        loads = f'datasets.load_dataset("{how}", data_files={json.dumps(old)}{options})["train"].to_json({json.dumps(new)})'
        return what, f"python -c {shlex.quote(f'import datasets; {loads}')}"
    return what, how.format(old=shlex.quote(old), new=shlex.quote(new))


def _beside(path: Path) -> Path:
    """A name for the same rows as JSONL."""
    return path.with_name(re.sub(r"(\.jsonl|\.json|\.csv)?\.\w+$", "", path.name) + "_rows.jsonl")


def check_data_files(config: Config) -> None:
    """Raises UserError for a file that is not there, or is a directory, and a cache that is a file."""
    for key, path in named_files(config).items():
        if key != "data.path" or not Path(path).is_dir():  # samples may be a directory, such as that of a run
            check_is_file(key, Path(path))
    if config.data.cache and Path(config.data.cache).is_file():
        raise UserError(f"data.cache={config.data.cache}: a file. Name a directory.")
