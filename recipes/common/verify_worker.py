"""The process behind verify_isolated.py: scores one completion a line, and ends when nobody asks any more.

Its arguments are the names of the rewards that it will be asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from recipes.common import rewards

ALONE_S = 60.0  # well beyond verify_isolated.TIME_S: a rank that is killed meanwhile kills nothing any more


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in sys.argv[1:]:
        if name in rewards.SLOW_IMPORTS:  # not within the first completion's time
            importlib.import_module(rewards.SLOW_IMPORTS[name])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, ALONE_S)  # its signal ends the process, wherever a library may be
        row = {key: [value] for key, value in asked["row"].items()}
        try:
            answer = {"score": rewards.REWARDS[asked["name"]]([""], [asked["completion"]], **row)[0], "error": None}
        except Exception as error:  # whatever the libraries raise on this completion is its failure
            answer = {"score": 0.0, "error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
