"""Signals that the launcher takes, and what a run amounts to."""

from __future__ import annotations

import os
import signal

import pytest

from launch.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_INTERRUPTED
from launch.execution import execute
from launch.execution.supervise import Outcome
from tests.helpers.supervised import DONE, plan_of


@pytest.mark.parametrize("number", execute.ASKS_TO_STOP)
def test_a_signal_is_noted_and_the_old_handler_comes_back(number):
    before = signal.signal(number, handler := lambda *_: None)  # under nohup it would be ignored
    try:
        with execute.signals() as received:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert received == [number, number]
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with execute.signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("status", "result", "code"),
    [
        ("done", "done", EXIT_DONE),
        ("done", None, EXIT_FAILED),
        ("done", "failed", EXIT_FAILED),
        ("interrupted", "interrupted", EXIT_INTERRUPTED),
        ("interrupted", None, EXIT_INTERRUPTED),
        ("interrupted", "done", EXIT_DONE),  # the signal came when all was done
        (
            "failed",
            "interrupted",
            EXIT_FAILED,
        ),  # the server failed, and the ranks saved as they were stopped
        ("failed", "done", EXIT_FAILED),
        ("hung", "interrupted", EXIT_HUNG),
        ("hung", None, EXIT_HUNG),
    ],
)
def test_what_a_run_amounts_to(tmp_path, status, result, code):
    plan = plan_of(tmp_path, {"trainers": DONE})
    assert (
        execute._exit_code(plan, Outcome(status, "trainers"), {"status": result} if result else {})
        == code
    )
