"""Score completions for verify_isolated.py, which writes a line per request to stdin.

Arguments: CPU seconds per score, bytes of memory in addition to the imports, names of rewards. Once
ready, the process may not open sockets, start processes or write files. It may never read files of
other processes, such as the rank's environment. An audit hook (PEP 578) blocks such calls, and the
reward's scores are discarded. This protects against completions that manipulate a reward. Code
written by a model runs only in the sandbox.
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

# Seconds until this process ends itself because its rank was killed; far above WAIT_S.
ORPHAN_S = 120.0
BLOCKED = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill"),
    *("pty.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link"),
    *("os.symlink", "os.truncate", "os.chmod", "os.chown"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """Block events as an audit hook, and list them in `blocked`.

    `is_ready` becomes true after the imports, which may write files and start processes.
    """

    def __init__(self) -> None:
        self.blocked: list[str] = []
        self.is_ready = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        is_blocked = self.is_ready and event.startswith(BLOCKED)
        if event == "open":
            path, writes = args[0], isinstance(args[2], int) and args[2] & WRITES
            is_blocked = bool(self.is_ready and writes)
            if isinstance(path, (str, bytes)):
                real = os.path.realpath(os.fsdecode(path))
                # Below an open directory, a path could lead to another process unnoticed.
                is_blocked |= of_another_process(real) or (self.is_ready and os.path.isdir(real))
        if is_blocked:
            self.blocked.append(f"{event} {args[0]!r}" if event == "open" else event)
            raise PermissionError(f"rewards may not call {self.blocked[-1]}")


def of_another_process(path: str) -> bool:
    pid = path.removeprefix("/proc/").partition("/")[0]
    return pid.isdecimal() and pid != str(os.getpid())


def main() -> None:
    # A rank without batches may exit during the imports. Then end silently at the first reply.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    time_s, memory, *names = sys.argv[1:]
    guard = Guard()
    sys.addaudithook(guard)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the replies
    try:
        # Imports write to HOME. For example, matplotlib (for reasoning-gym) writes a list of fonts.
        with tempfile.TemporaryDirectory() as home:
            os.environ["HOME"] = home
            for name in names:  # the time limit of the first completion excludes imports
                if "." in name:
                    reward_functions.import_reward(name)
                elif name in reward_functions.SLOW_IMPORTS:
                    importlib.import_module(reward_functions.SLOW_IMPORTS[name])
    except Exception as error:  # any exception of a user's module
        message = str(error)
        if not isinstance(error, UserError):
            message = (
                f"method.rewards.{name}: importing it raises {type(error).__name__}: {error}. The "
                "reward's process does not see the rank's environment. To run it in the rank, use: "
                "method.reward_confined=false."
            )
        print(" ".join(message.split()), file=replies, flush=True)
        return
    limit_memory(int(memory))
    guard.is_ready = True
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The timers' signals kill the process, even inside a library.
        further_s = float(time_s) * (len(request["completions"]) - 1)
        signal.setitimer(signal.ITIMER_PROF, float(time_s) + further_s)
        signal.setitimer(signal.ITIMER_REAL, ORPHAN_S + further_s)
        reply = reply_to(request, guard)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


def limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its current size. Beyond it, MemoryError."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = size + more if hard == resource.RLIM_INFINITY else min(size + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def reply_to(request: dict[str, Any], guard: Guard) -> dict[str, Any]:
    """Return {scores, error} for a request {name, prompts, completions, columns}.

    `scores` is null if there is an error. Return {rejected} if the function itself is invalid.
    """
    guard.blocked.clear()
    try:
        scores, error = reward_functions.attempt(**request)
    except UserError as error:
        return {"rejected": str(error)}
    # The reward, or a library, may have caught the exception and scored the completion.
    if guard.blocked and guard.blocked[0] not in (error or ""):
        reason = f"rewards may not call {guard.blocked[0]}"
        scores, error = None, f"{error}; before it: {reason}" if error else reason
    return {"scores": scores, "error": error}


if __name__ == "__main__":
    main()
