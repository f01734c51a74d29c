"""Find the Triton kernels in a user's file, and read their arguments (args= and grid=)."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction, KernelParam

from launch.core.errors import UserError, near_or_all
from recipes.tune.kernels import DIVISIBLE, SMALL, TYPES, Launch, argument_of, launch_of


def file_launches(place: str, arguments: dict[str, str], grid: Sequence[str]) -> list[Launch]:
    """Return the launches of `file.py:function`, one for each combination of `a|b` in arguments."""
    choices = {name: text.split("|") for name, text in arguments.items()}
    tiles = tuple(name for name, texts in choices.items() if len(texts) > 1)
    combinations = itertools.product(*choices.values())
    launches = [file_launch(place, dict(zip(choices, c, strict=True)), grid) for c in combinations]
    return [replace(launch, tiles=tiles) for launch in launches]


def file_launch(place: str, arguments: dict[str, str], grid: Sequence[str] = ()) -> Launch:
    """Return the launch of `file.py:function`.

    An argument is the text of a type (`*bf16`, `i32`, or `i32:16` for a multiple of 16), with
    `@number` for its value or number of elements, or of a constant. Without an argument, a
    parameter has the type of its annotation, or its default.
    Pointers are assumed to be multiples of 16, and their tensors smaller than 2 GB. Raise UserError
    if the file, the function or an argument is missing or unknown.
    """
    file, _, name = place.rpartition(":")
    functions = load_kernels(Path(file))
    if name not in functions:
        raise UserError(
            f"kernel={place}: no such function with @triton.jit.{near_or_all(name, functions)}"
        )
    function = functions[name]
    for key in arguments:
        if key not in function.arg_names:
            near = near_or_all(key, function.arg_names)
            raise UserError(f"args: {name} has no parameter {key}.{near}")
    typed = []
    for parameter in function.params:
        text = arguments.get(parameter.name, parameter.annotation_type)
        if not text and parameter.has_default and parameter.name not in arguments:
            typed.append((*argument_of(parameter, parameter.default), parameter.default))
        else:
            typed.append(_from_text(parameter, text))
    sides = tuple(_side(side, dict(zip(function.arg_names, typed, strict=True))) for side in grid)
    values = {
        name: value
        for name, (kind, _, value) in zip(function.arg_names, typed, strict=True)
        if kind != "constexpr" and value is not None
    }
    launch = launch_of(name, function, typed, {}, math.prod(sides) if sides else None)
    return replace(launch, values=values, grid=sides or None)


def _side(side: str, arguments: dict[str, tuple[str, list[list[Any]], Any]]) -> int:
    """Return a side of the grid: a number, or number/CONSTANT rounded up."""
    number, _, name = side.partition("/")
    kind, _, constant = arguments.get(name, ("", [], None))
    if name and not (kind == "constexpr" and isinstance(constant, int) and constant > 0):
        raise UserError(f"grid={side}: {name} is not a constant of the kernel. Use: grid={number}.")
    return -(-int(number) // constant) if name else int(number)


def _from_text(parameter: KernelParam, text: str) -> tuple[str, list[list[Any]], Any]:
    """Return type, attributes and constant of a parameter from the text of its argument."""
    match = re.fullmatch(rf"((\**|\*k)(?:{'|'.join(TYPES)}))(:16)?(?:@(\d+))?", text)
    if match and not parameter.is_constexpr:
        kind, pointer, multiple, number = match.groups()
        value = int(number) if number else None
        multiple = multiple or (value is not None and value % 16 == 0)
        return kind, [DIVISIBLE, SMALL] if pointer else [DIVISIBLE] if multiple else [], value
    if text.startswith("tl.") and isinstance(getattr(tl, text[3:], None), tl.dtype):
        return "constexpr", [], getattr(tl, text[3:])
    with contextlib.suppress(ValueError):
        return "constexpr", [], json.loads({"none": "null"}.get(text.lower(), text.lower()))
    example = "128" if parameter.is_constexpr else "*bf16"
    raise UserError(
        f"args: {parameter.name}={text or '?'} is neither a type nor a constant. Use, for example, "
        f"args={parameter.name}={example}. Types: {', '.join(TYPES)}, with prefix * for a pointer "
        "or suffix :16 for a multiple of 16. Constants: numbers, true, false, none and Triton's "
        f"dtypes, such as tl.float32.{near_or_all(text.lstrip('*'), TYPES)}"
    )


def load_kernels(file: Path) -> dict[str, JITFunction]:
    """Import a file and return its Triton kernels by name. Raise UserError if that fails."""
    name = f"kernels_of_{file.stem}"
    loader = SourceFileLoader(name, str(file))  # accepts any file extension
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    sys.path.insert(0, str(file.parent))  # like `python file.py`, for imports from its folder
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise UserError(
            f"kernel={file}: the file cannot be imported: {type(error).__name__}: {error}. "
            "Use kernel=path/to/file.py:function."
        ) from error
    finally:
        sys.path.pop(0)
    kernels = {}
    for key, value in vars(module).items():
        # @triton.autotune and @triton.heuristics wrap the kernel and store it in `fn`.
        while type(value).__module__.startswith("triton.") and not isinstance(value, JITFunction):
            value = getattr(value, "fn", None)
        if isinstance(value, JITFunction):
            kernels[key] = value
    return kernels
