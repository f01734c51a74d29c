"""Run the plans that README.md and docs/ show, and update their output in the pages.

    .venv/bin/python docs/plan_outputs.py

An output is the ```console block below a `$ python launch/run.py ... mode=plan`. It shows a machine
without the image and the weights, and leaves out the output directory and the next command.
Behind `| grep ...` or `| head ...`, it is what that program prints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"(```console\n\$ python (launch/run\.py [^\n|]* mode=plan)(?: \| ([^\n]*))?\n).*?(```)",
    re.DOTALL,
)
OUTPUT = re.compile(r"^  output .*\n", re.MULTILINE)
UNKNOWN, ABSENT = "not checked (no docker engine)", "not built yet"


def plan_output(command: str, reader: str | None) -> str:
    argv = [sys.executable, *shlex.split(command)]
    env = {**os.environ, "HF_HOME": "/no/such/cache", "DOCKER_HOST": "unix:///no/such/engine"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    shown = done.stdout if reader else done.stdout.partition("verbose=true")[0]
    if reader:
        filtered = subprocess.run(
            shlex.split(reader), input=shown, capture_output=True, text=True, check=True
        )
        shown = filtered.stdout
    page = OUTPUT.sub("", shown).replace(UNKNOWN, ABSENT).replace(f"{ROOT}/", "")
    return "".join(f"{line.rstrip()}\n" for line in page.rstrip().splitlines())


def updated(page: str) -> str:
    """Return the text of a page with the outputs of today's plans."""
    return BLOCK.sub(lambda block: block[1] + plan_output(block[2], block[3]) + block[4], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
