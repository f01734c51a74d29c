"""Find the source of a user's reward, and what it needs, without importing it."""

import ast
import os
import sys
from pathlib import Path

from launch.inputs.paths import python_path
from launch.schema import Config

ROOT = Path(__file__).parents[2]
# Parameters that are not columns of the rows: TRL's, and those of every reward.
GIVEN = "prompts completions completion_ids trainer_state log_extra log_metric environments".split()


def source_of(module: str, config: Config) -> Path | None:
    """Return the file of a module where ranks will look for it; None if they will not find it.

    They look in the working directory, the user's PYTHONPATH and the installed packages. A
    container has this repository, but no other folders of this machine.
    """
    shell = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [folder for folder in sys.path if folder not in shell]
    if config.runtime.on_node != "local":
        prefixes = (sys.prefix, sys.base_prefix)
        installed = [f for f in sys.path if any(map(Path(f).is_relative_to, prefixes))]
        installed.append(str(ROOT))
    folders = (os.getcwd(), *python_path(config, os.environ), *installed)
    bases = [Path(folder, *module.split(".")) for folder in folders]
    files = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
    return next(filter(Path.is_file, files), None)


def sources(config: Config) -> list[str]:
    """Return the files of the user's rewards; not what these files import."""
    modules = [name.rpartition(".")[0] for name in config.method.rewards if "." in name]
    return [str(source) for module in modules if (source := source_of(module, config))]


def columns_of(name: str, config: Config) -> list[str]:
    """Return the columns that a function needs: its parameters without a default.

    Return [] if the function is not defined at the top of its module, or is not the user's.
    """
    module, _, function = name.rpartition(".")
    source = source_of(module, config) if module else None
    body = ast.parse(source.read_text(encoding="utf-8")).body if source else []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            names, positional = node.args, [*node.args.posonlyargs, *node.args.args]
            needed = positional[: len(positional) - len(names.defaults)]
            by_keyword = zip(names.kwonlyargs, names.kw_defaults, strict=True)
            needed += [name for name, default in by_keyword if default is None]
            return [name.arg for name in needed if name.arg not in GIVEN]
    return []
