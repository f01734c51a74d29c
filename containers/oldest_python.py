"""Hand over to a newer Python, or exit with one message, if this one is too old.

containers/environment.py imports it first.

Python 3.6 must be able to run this file.
"""

import os
import shutil
import sys

OLDEST = (3, 11)
NEWER = ("python3.11", "python3.12", "python3.13", "python3.14")


def check() -> None:
    if sys.version_info[:2] >= OLDEST:
        return
    # A Python that the user named is not replaced.
    newer = None if os.environ.get("PYTHON") else next(filter(None, map(shutil.which, NEWER)), None)
    if newer:
        os.execv(newer, [newer, *sys.argv])
    print(
        "error: Python {}.{} is too old: 3.11 or newer is needed. Name one with `make setup "
        "PYTHON=python3.11`, or "
        "install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)".format(
            *sys.version_info[:2]
        ),
        file=sys.stderr,
    )
    sys.exit(2)


check()
