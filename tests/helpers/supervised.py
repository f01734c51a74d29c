"""Build plans whose processes are small Python scripts, which start in 0.1 s.

    python tests/helpers/supervised.py <run directory> <name>=<script> ... [key=value] ...

This executes a plan as launch/run.py does, for tests that kill the launcher.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch.core.console import run_program
from launch.execution import execute
from launch.plan.planning import make_plan
from launch.schema.plan import Plan, Process
from tests.conftest import composed, host_with

QUICK = "runtime.stop_timeout_s=5"
KINDS = {"prepare": "prepare", "server": "server", "trainers": "trainer"}
# The start of every script, with functions to write files as a recipe does.
COMMON = """
import json, os, pathlib, signal, subprocess, sys, time
run = pathlib.Path(sys.argv[1])
def write(name, **content):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text(json.dumps(content))
def note(line):
    with (run / "order").open("a") as file:
        file.write(line + "\\n")
def forever():
    while True:
        time.sleep(0.02)
"""
DONE = "write('result.json', status='done')"
FOREVER = "forever()"
# Saves after SIGTERM, as recipes/rank/program.py does.
SAVES = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
note("trains")
while not asked:
    time.sleep(0.02)
time.sleep(0.3)
write("saved")
write("result.json", status="interrupted")
sys.exit(75)
"""
# Answers health checks as vLLM does.
HEALTH = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
"""
SERVER = f"""{HEALTH}
note("server listens")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def plan_of(run_dir: Path, scripts: dict[str, str], *overrides: str) -> Plan:
    """Return a small plan for the CPU whose process groups run `scripts`, in that order."""
    config = composed("hardware=cpu", "method=sft", "runtime=local", *overrides)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    plan = make_plan(config, host_with(0), run_dir)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for name, script in scripts.items():
        listens = {"port": port} if KINDS[name] == "server" else {}
        argv = [sys.executable, "-c", COMMON + script, str(run_dir), str(port)]
        processes.append(
            Process(name, KINDS[name], argv, plan.processes[-1].settings, [], **listens)
        )
    return dataclasses.replace(plan, processes=processes)


def executed(plan: Plan) -> tuple[int, dict[str, Any]]:
    """Execute a plan. Return the exit code and the record."""
    code = execute.execute(plan, host_with(0), None)
    return code, json.loads((plan.run_dir / "record.json").read_text())


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> bool:
    """Wait until `condition` is true, or for `within_s`, which allows for a busy machine."""
    deadline = time.monotonic() + within_s
    while not (is_met := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_met


def main(arguments: list[str]) -> int:
    run_dir, *pairs = arguments
    scripts = dict(pair.split("=", 1) for pair in pairs if pair.split("=", 1)[0] in KINDS)
    overrides = [pair for pair in pairs if pair.split("=", 1)[0] not in KINDS]
    return execute.execute(plan_of(Path(run_dir), scripts, *overrides), host_with(0), None)


if __name__ == "__main__":
    run_program(main)
