"""Score completions for verify_isolated.py, one line per request, until no request comes.

Arguments: CPU seconds for one score, bytes of memory in addition to the imports, names of rewards.
Once ready, the process may not open sockets, start processes or write files: an audit hook (PEP
578) rejects that, together with the scorer's result. This guards against scorers that a completion
manipulates; code that a model wrote runs only in the sandbox.
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

from launch.core.errors import UserError
from recipes.rewards import reward_functions

# Far above verify_isolated.WAIT_S; ends this process if its rank was killed and cannot end it.
ALONE_S = 120.0
REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill"),
    *("pty.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"),
    *("os.symlink", "os.truncate", "os.chmod", "os.chown"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """Reject events as an audit hook, and list them in `refused` until it is cleared."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED) or (
            event == "open" and isinstance(args[2], int) and args[2] & WRITES
        ):
            self.refused.append(f"{event} {args[0]!r}" if event == "open" else event)
            raise PermissionError(f"a scorer may not: {self.refused[-1]}")


def main() -> None:
    time_s, memory, *names = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the replies
    try:
        # Imports write to HOME; for example matplotlib, for reasoning-gym, writes a list of fonts.
        with tempfile.TemporaryDirectory() as home:
            os.environ["HOME"] = home
            for name in names:  # import now, so that it does not count for the first completion
                if "." in name:
                    reward_functions.imported(name)
                elif name in reward_functions.SLOW_IMPORTS:
                    importlib.import_module(reward_functions.SLOW_IMPORTS[name])
    except UserError as error:
        print(" ".join(str(error).split()), file=answers, flush=True)
        return
    except Exception as error:  # any exception of a user's module
        message = (
            f"method.rewards has {name!r}: its import raises {type(error).__name__}: {error}. "
            "The rank's environment is hidden from it. "
            "Use: method.reward_confined=false, which runs it in the rank."
        )
        print(" ".join(message.split()), file=answers, flush=True)
        return
    limit_memory(int(memory))
    guard = Guard()
    sys.addaudithook(guard)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        # The timers' signals end the process, even inside a library.
        further_s = float(time_s) * (len(question["completions"]) - 1)
        signal.setitimer(signal.ITIMER_PROF, float(time_s) + further_s)
        signal.setitimer(signal.ITIMER_REAL, ALONE_S + further_s)
        answer = answer_to(question, guard)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


def limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above the current size; beyond it is MemoryError."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = size + more if hard == resource.RLIM_INFINITY else min(size + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def answer_to(question: dict[str, Any], guard: Guard) -> dict[str, Any]:
    """Return {scores, error} for a question {name, prompts, completions, columns}.

    `scores` are null with an error. Return {refused} if the function itself is at fault.
    """
    guard.refused.clear()
    try:
        scores, error = reward_functions.attempt(**question)
    except UserError as refusal:
        return {"refused": str(refusal)}
    # The scorer, or a library, may have caught the exception, as if the answer was wrong.
    if guard.refused and guard.refused[0] not in (error or ""):
        refused = f"a scorer may not: {guard.refused[0]}"
        scores, error = None, f"{error}; before it: {refused}" if error else refused
    return {"scores": scores, "error": error}


if __name__ == "__main__":
    main()
