"""The process behind verify_isolated.py: scores the completions of a line, and ends when nobody asks any more.

Its arguments are the CPU seconds for one score, the bytes of memory that it may take on top of its imports, and the names of the rewards
that it will be asked for. Once it is ready it opens no socket, starts no process and writes no file: an audit hook (PEP 578) refuses, and
what made a scorer try fails, whatever the scorer makes of the refusal. This guards against what a completion can lead a scorer to, a
parser's surprise; code that a model wrote is never run here, but in the sandbox.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from typing import Any

from recipes.common import rewards
from recipes.common.errors import UserError

ALONE_S = 120.0  # well beyond verify_isolated.WAIT_S, and as it grows: a rank that is killed meanwhile kills nothing any more
REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "pty.", "shutil.")
REFUSED += ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """The audit hook, and what it has refused since `refused` was emptied."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED) or (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
            self.refused.append(f"{event} {args[0]!r}" if event == "open" else event)
            raise PermissionError(f"a scorer may not: {self.refused[-1]}")


def main() -> None:
    time_s, memory, *names = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        with tempfile.TemporaryDirectory() as home:  # where imports keep things: matplotlib, which reasoning-gym's takes, a list of fonts
            os.environ["HOME"] = home
            for name in names:  # not within the first completion's time
                if "." in name:
                    rewards.imported(name)
                elif name in rewards.SLOW_IMPORTS:
                    importlib.import_module(rewards.SLOW_IMPORTS[name])
    except UserError as error:
        print(" ".join(str(error).split()), file=answers, flush=True)
        return
    except Exception as error:  # whatever a stranger's module raises
        said = (
            f"method.rewards has {name!r}: its import raises {type(error).__name__}: {error}. It has none of the rank's environment here."
        )
        print(" ".join(f"{said} Use: method.reward_confined=false, which has it in the rank.".split()), file=answers, flush=True)
        return
    limit_memory(int(memory))
    guard = Guard()
    sys.addaudithook(guard)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # Their signals end the process, wherever a library may be.
        further_s = float(time_s) * (len(asked["completions"]) - 1)
        signal.setitimer(signal.ITIMER_PROF, float(time_s) + further_s)
        signal.setitimer(signal.ITIMER_REAL, ALONE_S + further_s)
        answer = answer_to(asked, guard)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


def limit_memory(more: int) -> None:
    """Let the process take `more` bytes of addresses on top of those it has: beyond that Python raises MemoryError."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = taken + more if hard == resource.RLIM_INFINITY else min(taken + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def answer_to(asked: dict[str, Any], guard: Guard) -> dict[str, Any]:
    """{scores, error} of a question {name, prompts, completions, columns}: `scores` null where there is an error; {refused} of a function
    that no completion is to blame for."""
    guard.refused.clear()
    try:
        scores = rewards.judge(**asked)
    except MemoryError:
        return {"scores": None, "error": "more memory than a scorer may take"}
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:  # whatever the libraries raise on these completions is their failure
        said = rewards.failure(asked["name"], error)
        if guard.refused and guard.refused[0] not in said:  # what a library made of it
            said += f"; before it: a scorer may not: {guard.refused[0]}"
        return {"scores": None, "error": said}
    if guard.refused:  # a scorer that takes every exception for a wrong answer says nothing of it
        return {"scores": None, "error": f"a scorer may not: {guard.refused[0]}"}
    return {"scores": scores, "error": None}


if __name__ == "__main__":
    main()
