"""Start two gloo ranks as torchrun does, but after their imports, which take seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from recipes import redirect

NUM_RANKS = 2


def run(work: Callable[[], int], argv: list[str]) -> int:
    """Return 0 if `work` returns 0 on both ranks, or else the first other exit code.

    Both ranks log next to the `--config` of `argv`. If one fails, the other gets SIGTERM.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    codes, ranks = [], [_fork(rank, port, work, argv) for rank in range(NUM_RANKS)]
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        codes.append(os.waitstatus_to_exitcode(status))
        for other in ranks if codes[-1] else ():
            os.kill(other, signal.SIGTERM)
    return next(filter(None, codes), 0)


def _fork(rank: int, port: int, work: Callable[[], int], argv: list[str]) -> int:
    if process := os.fork():
        return process
    code = 1
    try:
        for name, value in (("RANK", rank), ("WORLD_SIZE", NUM_RANKS)):
            os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        redirect(argv, os.environ)
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # like recipes/rank/program.py with gloo
