"""Test torchrun as the supervisor starts it, with scripts in place of recipes.

The first failure is told, and no rank is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time

import pytest

from launch.execution import execute, orphans
from tests.conftest import ROOT, host_with
from tests.helpers.supervised import COMMON, DONE, SAVES, eventually, plan_of

TORCHRUN = [
    sys.executable,
    *"-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2".split(),
]
# The first lines of a recipe.
OWN_LOG = (
    "from recipes import redirect\nredirect(['--config', str(run / 'config.yaml')], os.environ)\n"
)
RANK_1 = (
    "if os.environ['RANK'] == '1':\n    while not (run / 'rank0').exists(): time.sleep(0.02)\n    "
)
RANK_0 = "\n(run / 'rank0').write_text(str(os.getpid()))\n"


def torchrun(run_dir, script, *overrides):
    """Return a plan whose trainers are two ranks of this script."""
    plan = plan_of(run_dir, {"trainers": DONE}, "runtime.stop_timeout_s=20", *overrides)
    (run_dir / "rank.py").write_text(COMMON + OWN_LOG + script)
    process = dataclasses.replace(
        plan.processes[0], argv=[*TORCHRUN, str(run_dir / "rank.py"), str(run_dir)], num_ranks=2
    )
    return dataclasses.replace(plan, processes=[process])


@pytest.mark.parametrize(("end", "words"), [
    ("os.kill(os.getpid(), signal.SIGKILL)",
     "trainers, rank 1 failed: killed by signal 9 (SIGKILL)"),
    ("print('rank 1 says why', flush=True); write('failures/rank1.json', rank=1, "
     "time=1.0, error='ValueError: no', exit_code=1); sys.exit(1)",
     "trainers, rank 1 failed: ValueError: no"),
])  # fmt: skip
def test_one_rank_fails_while_another_waits(tmp_path, capsys, end, words):
    began = time.monotonic()
    plan = torchrun(tmp_path, f"{RANK_1}{end}\nprint('rank 0 waits', flush=True){RANK_0}forever()")
    assert execute.execute(plan, host_with(0), None) == 4
    assert time.monotonic() - began < 30, (
        "torchrun waits that long for a rank that ignores SIGTERM, and this one does not"
    )
    output, shown = capsys.readouterr()
    assert words in output
    assert "closing signal" not in output, "the last lines are the rank's, not torchrun's"
    why = "says why" in end
    assert (f"Last lines of {tmp_path / 'logs/rank1.log'}:\n  | rank 1 says why\n" in output) == why
    assert ("\nrank 1 | rank 1 says why\n" in shown) == why
    assert "rank 0 | rank 0 waits\n" in shown
    assert "closing signal SIGTERM" in (tmp_path / "logs/trainers.log").read_text(), (
        "torchrun's own lines stay in the group's"
    )
    assert orphans.marked({orphans.LAUNCHER: orphans.launcher()}) == []


def test_the_launcher_is_killed_and_torchruns_ranks_save(tmp_path):
    """The guard ends the ranks, although torchrun gives each rank its own session."""
    plan = torchrun(
        tmp_path,
        SAVES.replace("time.sleep(0.3)", "time.sleep(0.3); write('saved' + os.environ['RANK'])"),
    )
    code = """
import sys, pickle
from launch.execution import execute
from tests.conftest import host_with
sys.exit(execute.execute(pickle.loads(sys.stdin.buffer.read()), host_with(0), None))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, env=env, cwd=tmp_path
    ) as child:
        child.stdin.write(pickle.dumps(plan))
        child.stdin.close()
        order = tmp_path / "order"
        assert eventually(lambda: order.exists() and order.read_text().count("trains") == 2, 60)
        of = {orphans.LAUNCHER: f"{orphans._namespace()}:{orphans.identity(child.pid)}"}
        assert len(orphans.marked(of)) == 3, "torchrun and two ranks"
        child.kill()
    assert eventually(lambda: orphans.marked(of) == [])
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_ctrl_c_saves_on_every_rank(tmp_path):
    """Torchrun does not kill ranks that save for a large part of runtime.stop_timeout_s."""
    script = SAVES.replace("time.sleep(0.3)", "time.sleep(2); write('saved' + os.environ['RANK'])")
    # The launcher, which is this process, is torchrun's parent.
    interrupts = f"""
if os.environ['RANK'] == '0':
    while (run / 'order').read_text().count('trains') < 2: time.sleep(0.02)
    os.kill({os.getpid()}, signal.SIGINT)
while not asked"""
    plan = torchrun(tmp_path, script.replace("\nwhile not asked", interrupts))
    assert execute.execute(plan, host_with(0), None) == 75
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "interrupted"
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
