"""Test the signals that the launcher handles, and its exit code."""

from __future__ import annotations

import os
import signal

import pytest

from launch.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED
from launch.core.stop_signals import STOP_SIGNALS
from launch.execution import execute
from launch.execution.supervise import Outcome
from tests.helpers.supervised import DONE, plan_of


@pytest.mark.usefixtures("hangups")
def test_signals_are_collected_and_the_old_handlers_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with execute.signals() as received:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    assert received == list(STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with execute.signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("status", "result", "code"), [
    ("done", "done", EXIT_DONE),
    ("done", None, EXIT_FAILED),
    ("interrupted", None, EXIT_INTERRUPTED),
    ("interrupted", "done", EXIT_DONE),  # the signal came after the run had ended
    ("failed", "interrupted", EXIT_FAILED),  # the server failed, and the ranks saved
    ("hung", "interrupted", EXIT_HUNG),
])  # fmt: skip
def test_exit_code(tmp_path, status, result, code):
    plan, outcome = plan_of(tmp_path, {"trainers": DONE}), Outcome(status, "trainers")
    assert execute.exit_code(plan, outcome, {"status": result}) == code
