"""Compose the text of --help: help.txt with the groups and options of conf/."""

from __future__ import annotations

import textwrap
from pathlib import Path

from launch.config.wording import groups

TEXT = Path(__file__).with_name("help.txt")


def is_requested(arguments: list[str]) -> bool:
    return any(argument in ("--help", "-h", "help") for argument in arguments)


def text() -> str:
    wrapper = textwrap.TextWrapper(98, subsequent_indent=" " * 15)
    lines = [
        wrapper.fill(f"  {group + '=':<12} {', '.join(options)}")
        for group, options in groups().items()
        if options and "_" not in group
    ]
    return TEXT.read_text(encoding="utf-8").rstrip().replace("{groups}", "\n".join(lines))
