"""Write docs/reference/ from the schema, conf/ and the tables that the launcher reads.

    .venv/bin/python docs/generate_reference.py

tests/docs/test_reference.py compares the pages with what this program would write. They are
committed, because most readers open docs/ in the repository, and because a review shows what a
change does to the reference.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from omegaconf import MISSING

from launch.config.wording import headers, summary
from launch.core import errors
from launch.core.json_files import yaml_file
from launch.execution.meaning import table as failure_rows
from launch.schema import Config
from launch.schema.enums import When
from recipes.rewards import reward_functions, verify_code

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
FOLDER = ROOT / "docs" / "reference"
TABLES = yaml_file(Path(__file__).with_suffix(".yaml"))
INTRODUCTIONS = TABLES["introductions"]
Rows = Iterable[Iterable[Any]]
TYPES = {int: "whole number", float: "number", bool: "true, false", str: "text", Any: "any"}


# ---- Markdown


def code(value: Any) -> str:
    quote = "``" if "`" in str(value) else "`"
    return f"{quote}{value}{quote}" if value not in (None, "") else ""


def word(value: Any) -> Any:
    """Return a value as YAML spells it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return value.name if isinstance(value, Enum) else value


def cell(value: Any) -> str:
    text = re.sub(r"\s+", " ", str("" if value is None else value)).strip().replace("|", "\\|")
    return re.sub(r"(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


def table(titles: str, rows: Rows) -> str:
    """Return a table; `titles` are separated by two spaces."""
    heads = re.split(r"  +", titles)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def link(path: Path, text: str | None = None) -> str:
    relative = path.relative_to(ROOT).as_posix()
    return f"[{text or relative}](../../{relative})"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if value < 1e6 else f"{value:,}"


# ---- What the code says


def source_comments(owner: type | types.ModuleType) -> dict[str, str]:
    """Return the comment above or after each assignment of a class or module, by name."""
    source = inspect.cleandoc("\n" + inspect.getsource(owner))
    tree, lines = ast.parse(source), source.splitlines()
    body = tree.body[0].body if isinstance(owner, type) else tree.body  # type: ignore[attr-defined]
    comments = {}
    for node in body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        above = [line.strip().lstrip("# ") for line in lines[first : node.lineno - 1]]
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().lstrip(" #")
        comments[ast.unparse(target)] = " ".join([*above, after]).strip()
    return comments


def composed(file: Path) -> dict[str, Any]:
    """Return a file of conf/hardware or conf/method, merged over the files that it extends."""
    own, merged = yaml_file(file), dict[str, Any]()
    for base in own.pop("defaults", []):
        if base != "_self_":
            _merge(merged, composed(file.parent / f"{base.partition('@')[0]}.yaml"))
    _merge(merged, own)
    return merged


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value


def options(group: str) -> Iterator[tuple[str, Path]]:
    for file in sorted((CONF / group).rglob("*.yaml")):
        name = file.relative_to(CONF / group).with_suffix("").as_posix()
        if name != "auto" and not name.startswith("base/"):
            yield name, file


# ---- Pages


def keys() -> str:
    titles = "key  values  default  meaning"
    sections = [f"## Top-level keys\n\n{table(titles, _key_rows(Config, ''))}"]
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            about = inspect.getdoc(kind) or ""
            if about.startswith(f"{kind.__name__}("):  # written by dataclass
                about = ""
            sections.append(f"## {name}\n\n{about}\n\n{table(titles, _key_rows(kind, name))}")
    return "\n".join(sections)


def _key_rows(kind: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    comments = source_comments(kind)
    for parent in kind.__mro__[1:-1]:
        comments = source_comments(parent) | comments
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        node, key = hints[field.name], ".".join(filter(None, (prefix, field.name)))
        origin, inner = typing.get_origin(node), _entry(node)
        if dataclasses.is_dataclass(node):
            if prefix:
                yield from _key_rows(node, key)
            continue
        yield code(key), _values(node, field), _default(field), comments[field.name] or _about(node)
        if inner:
            mark = {list: "[]", dict: ".NAME"}.get(origin, "")
            yield from _key_rows(inner, key + mark)


def _about(node: Any) -> str:
    """Return the first sentence about an enumeration."""
    is_enum = isinstance(node, type) and issubclass(node, Enum)
    text = (node.__doc__ if is_enum else "") or ""
    return "" if "_member_" in text or text == Enum.__doc__ else text.partition("\n")[0]


def _entry(node: Any) -> Any:
    """Return the schema class of a list's or mapping's entries, or of an optional key."""
    inner = [kind for kind in typing.get_args(node) if dataclasses.is_dataclass(kind)]
    return inner[0] if inner else None


def _values(node: Any, field: dataclasses.Field[Any]) -> str:
    origin, inner = typing.get_origin(node), typing.get_args(node)
    if origin is typing.Union:
        (kind,) = (kind for kind in inner if kind is not type(None))
        values = _values(kind, field)
        return values if "`null`" in values else f"{values} or `null`"
    allowed = field.metadata.get("allowed")
    if isinstance(allowed, tuple):
        return ", ".join(code(word(value)) for value in allowed)
    if words := _enum_words(node):
        return words
    if origin in (list, dict):
        words = _enum_words(inner[-1]) or TYPES.get(inner[-1], "the keys below")
        name = f"{'list' if origin is list else 'mapping'}: {words}"
    else:
        name = TYPES.get(node, "the keys below")
    if allowed is None or str(allowed) == "at least -inf":
        return name
    return f"{name}, {getattr(allowed, 'meaning', allowed)}"


def _enum_words(node: Any) -> str:
    if not (isinstance(node, type) and issubclass(node, Enum)):
        return ""
    notes = source_comments(node)
    return "; ".join(f"{code(word.name)} {notes[word.name]}".strip() for word in node)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return "set in conf/" if value == MISSING else code(word(value))


def experiments() -> str:
    rows, parts = [], []
    for name, file in options("experiment"):
        about = headers(file)
        rows.append((f"[`{name}`](#{name})", summary(file)))
        parts.append(
            f"## {name}\n\n{about['about']}\n\nNeeds: {about['Needs']} File: {link(file)}.\n\n"
            f"    {about['Launch']}\n    {about['Override']}\n"
        )
    return "\n".join([table("experiment=  what it teaches", rows), *parts])


def hardware() -> str:
    rows = []
    for name, file in options("hardware"):
        h = composed(file)
        peak, precisions = h.get("peak_tflops", {}), h["precisions"]
        image = "none (`runtime=local`)" if h["container"] == "none" else code(h["container"])
        rows.append(
            (link(file, f"`{name}`"), h["product"], code(h["gfx"]), h["gpus_per_node"])
            + (number(h["memory_gb"]), number(h["bandwidth_gb_s"]), number(peak.get(precisions[0])))
            + (", ".join(precisions), image, "yes" if h.get("vllm", True) else "no")
        )
    return table(
        "hardware=  product  target  GPUs per node  memory, GiB  bandwidth, GB/s  "
        "peak, TFLOP/s  precisions, preferred first  image  vLLM",
        rows,
    )


def models() -> str:
    rows = []
    for name, file in options("model"):
        m = yaml_file(file)
        rows.append(
            (link(file, f"`{name}`"), m.get("architecture"), code(m.get("hub_id")))
            + (number(m.get("num_parameters")),)
            + tuple(map(m.get, ("num_layers", "hidden_size", "vocab_size", "max_positions")))
            + (code((m.get("revision") or "")[:12]),)
        )
    return table(
        "model=  architecture  hub_id  parameters  layers  hidden size  vocabulary  positions  "
        "revision",
        rows,
    )


def methods() -> str:
    parts = []
    for name, file in options("method"):
        m, about = composed(file), headers(file)
        topologies = ", ".join(m.get("topologies", [])) or "all that train"
        facts = [("program", code(m["program"])), ("arguments of", code(m["config_class"]))]
        facts += [("rows", code(m.get("rows"))), ("topologies", topologies)]
        facts += [("rewards", code(m.get("rewards")))]
        facts += [("held-out metrics", ", ".join(map(code, m.get("held_out_metrics", {}))))]
        facts = [fact for fact in facts if fact[1]]
        arguments = [
            (code(f"method.args.{key}"), code(word(v))) for key, v in m.get("args", {}).items()
        ]
        parts.append(
            f"## {name}\n\n{about['about']}\n\nNeeds: {about['Needs']} File: {link(file)}.\n\n"
            f"    {about['Launch']}\n\n{table('property  value', facts)}"
            + (f"\n{table('argument  default here', arguments)}" if arguments else "")
        )
    return "\n".join(parts)


def rewards() -> str:
    rows = [(code(reward_functions.CODE_TESTS), verify_code.__doc__ or "", code("tests"))]
    for name, function in reward_functions.REWARDS.items():
        columns = list(inspect.signature(function).parameters)[2:-1]  # after prompts, completions
        rows.append((code(name), inspect.getdoc(function) or "", ", ".join(map(code, columns))))
    summaries = (
        (name, re.sub("^(Return|Reward `code_tests`:) ", "", text.partition("\n\n")[0]), columns)
        for name, text, columns in sorted(rows)
    )
    return table("reward  gives  reads column", summaries)


def run_directory() -> str:
    return table(
        "file or folder  content",
        ((code(name), text) for name, text in TABLES["run_directory"].items()),
    )


def metrics() -> str:
    titles = yaml_file(ROOT / "launch/reports/titles.yaml")
    shares = ((key, (f"share of a step: {text}", "")) for key, text in titles["shares"].items())
    step = ((key, (f"time of a step: {text}", "s")) for key, text in titles["step"].items())
    parts = [
        ("Of the run", ((k, v) for k, v in titles["charts"].items())),
        ("Of the step (GRPO, and profiled runs)", [*step, *shares]),
        ("Of the GPU", titles["telemetry"].items()),
    ]
    return "\n".join(
        f"## {title}\n\n" + table("key  meaning  unit", ((code(k), v[0], v[1]) for k, v in rows))
        for title, rows in parts
    )


def environment() -> str:
    launcher = yaml_file(ROOT / "launch/plan/environment.yaml")
    found: dict[tuple[str, ...], list[str]] = {}
    for name, file in options("hardware"):
        for variable, entry in composed(file).get("env", {}).items():
            when = entry.get("when", "always")
            row = (variable, entry["value"], when, entry["reason"], entry["source"])
            found.setdefault(row, []).append(name)
    gpu = [
        (code(row[0]), code(row[1]), row[2], ", ".join(names), row[3], row[4])
        for row, names in sorted(found.items())
    ]
    when = ((code(w.name), source_comments(When)[w.name] or "every process") for w in When)
    parts = [
        f"## Of a GPU\n\n{table('variable  value  when  hardware  reason  source', gpu)}",
        f"`when` names the processes:\n\n{table('when  processes', when)}",
    ]
    for part, rows in launcher.items():
        lines = ((code(n), code(value), condition, reason) for n, value, condition, reason in rows)
        title = {"launcher": "Of every run", "debug": "Of debug=", "container": "Of containers"}
        parts.append(f"## {title[part]}\n\n{table('variable  value  condition  reason', lines)}")
    return "\n".join(parts)


def exit_codes() -> str:
    comments = source_comments(errors)
    rows = (
        (getattr(errors, name), text) for name, text in comments.items() if name.startswith("EXIT_")
    )
    return table("code  meaning", rows)


def failure_hints() -> str:
    rows = ((code(row["examples"][0].splitlines()[0]), row["means"]) for row in failure_rows())
    return table("a line of the log  what it means and what to do", rows)


PAGES = [keys, experiments, hardware, models, methods, rewards, run_directory, metrics]
PAGES += [environment, exit_codes, failure_hints]


def pages() -> dict[str, str]:
    """Return the text of each page of docs/reference/, by file name."""
    note = "<!-- Generated by docs/generate_reference.py. Do not edit. -->"
    texts = {}
    for page in PAGES:
        title, intro = INTRODUCTIONS[page.__name__]
        texts[f"{page.__name__}.md"] = f"{note}\n\n# {title}\n\n{intro}\n\n{page().rstrip()}\n"
    return texts


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
