"""Run the plans that docs/ shows, and update their output in the pages.

    .venv/bin/python docs/plan_outputs.py

An output is the ```console block below a `$ python launch/run.py ... mode=plan`. It keeps the first
box and the memory, without lines that differ from machine to machine. Behind `| grep ...` or
`| head ...`, it is what that program prints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(```console\n\$ python (launch/run\.py [^\n|]* mode=plan)(?: \| ([^\n]*))?\n).*?(```)",
    re.DOTALL,
)
LINES = re.compile(r"^╭.*?^╰[^\n]*\n|^Memory per GPU.*?^└[^\n]*\n", re.DOTALL | re.MULTILINE)
OF_THIS_MACHINE = re.compile(r"^│ run directory .*\n(?:│ {17}.*\n)*|^  output .*\n", re.MULTILINE)


def plan_output(command: str, reader: str | None) -> str:
    argv = [sys.executable, *shlex.split(command)]
    env = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    if reader:
        done = subprocess.run(
            shlex.split(reader), input=done.stdout, capture_output=True, text=True, check=True
        )
    output = (not reader and "".join(LINES.findall(done.stdout))) or done.stdout
    lines = OF_THIS_MACHINE.sub("", output).replace(f"{ROOT}/", "").splitlines()
    return "".join(
        f"{line[:-1].rstrip():<119}│\n" if line.startswith("│") else f"{line.rstrip()}\n"
        for line in lines
    )


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        update = BLOCK.sub(
            lambda block: block[1] + plan_output(block[2], block[3]) + block[4], page.read_text()
        )
        page.write_text(update)
