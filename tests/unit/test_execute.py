"""Signals that the launcher takes, and the order in which it stops what it started."""

from __future__ import annotations

import os
import signal

import pytest

from launch import execute


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_the_old_handler_comes_back(number):
    before, received = signal.getsignal(number), []
    with execute._signals(received):
        os.kill(os.getpid(), number)
    assert received == [number]
    assert signal.getsignal(number) == before


def test_nohup_stays_in_force():
    before, received = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        with execute._signals(received):
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Recorded:
    """A process group that writes down what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def ask_to_stop(self) -> None:
        self.said.append(f"ask {self.name}")

    def wait(self, timeout_s: float) -> None:
        assert 0 <= timeout_s <= 300

    def remove(self) -> None:
        self.said.append(f"remove {self.name}")


def test_trainers_are_gone_before_their_server_is_asked():
    """They share its network and process ids, which end with it; and a save may still need it."""
    said: list[str] = []
    execute._stop([Recorded("server", said), Recorded("trainers", said)], 300)
    assert said == ["ask trainers", "remove trainers", "ask server", "remove server"]
