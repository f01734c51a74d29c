"""Test following logs while they grow, and reading them after a failure."""

from __future__ import annotations

import pytest

from launch.execution import logs
from launch.execution.logs import Follower, LogTail, tail

API = "W1121 14:12:47.579000 2899 /x/torch/distributed/elastic/multiprocessing/api.py"
STOPS = f"{API}:1028] Sending process 2962 closing signal SIGTERM"
FAILED_0 = f"{API}:1002] failed (exitcode: 1) local_rank: 0 (pid: 2961) of binary: python"
FAILED = f"{API}:1002] failed (exitcode: -9) local_rank: 1 (pid: 2963) of binary: python"


def append(file, content: bytes) -> None:
    with file.open("ab") as log:
        log.write(content)


def test_complete_lines_since_the_last_call(tmp_path):
    log = tmp_path / "a.log"
    assert Follower(log).lines() == []
    log.write_bytes(b"of an earlier attempt\n")
    follower = Follower(log)
    assert follower.lines() == []
    append(log, b"one\ntw")
    assert follower.lines() == ["one"]
    append(log, b"o\nthree")
    assert follower.lines() == ["two"]
    assert follower.lines() == []
    assert follower.lines(with_partial=True) == ["three"]
    log.write_bytes(b"")  # the file is truncated
    assert follower.lines(with_partial=True) == []
    append(log, b"new\n")
    assert follower.lines() == ["new"]


def test_torchruns_report_of_a_failure_is_not_shown(tmp_path):
    log = tmp_path / "a.log"
    followers = [Follower(log), Follower(log, without_report=True)]
    append(
        log, f"error: no\n{STOPS}\nsaving\n{FAILED}\nTraceback (most recent call last):\n".encode()
    )
    assert [follower.lines()[-1] for follower in followers] == [
        "Traceback (most recent call last):",
        "saving",
    ]
    append(log, b"ChildFailedError\n")
    assert [follower.lines(with_partial=True) for follower in followers] == [
        ["ChildFailedError"],
        [],
    ]


STOP = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 13759 got signal: 15"
TRACEBACK = ["Traceback (most recent call last):", '  File "run.py", line 1', "    raise"]


@pytest.mark.parametrize(("lines", "shown"), [
    (["saved", *TRACEBACK, STOP, "after"], ["saved", "after"]),
    ([STOP], []),
    ([*TRACEBACK, "ValueError: x"], [*TRACEBACK, "ValueError: x"]),
])  # fmt: skip
def test_the_traceback_of_a_stopped_torchrun_is_not_shown(lines, shown):
    assert logs.without_stop_traceback(lines) == shown


def test_an_incomplete_line_is_bounded_and_a_progress_bar_shows_its_last_state(tmp_path):
    log = tmp_path / "a.log"
    follower = Follower(log)
    for _ in range(3):
        append(log, b"x" * 100_000)
        assert follower.lines() == []
        assert len(follower.rest) <= logs.MAX_LINE
    append(log, b"\nnext\n")
    assert [len(line) for line in follower.lines()] == [logs.MAX_LINE, 4]
    append(log, b"\r 1%|#\r50%|##\r100%|###\r\nwindows\r\n")
    assert follower.lines() == ["100%|###", "windows"]


def test_control_characters_are_removed():
    assert logs.text(b"\xff\xfe caf\xc3\xa9 \xc3") == "\ufffd\ufffd café \ufffd"
    assert logs.text(b"a\x00b\x07\x1b[31mred\x1b[0m\x1b[2J\tend") == "abred\tend"
    assert logs.text(b"\x1b]0;a title\x07[bold]not markup[/bold]") == "[bold]not markup[/bold]"


def test_repeated_lines_are_not_progress(tmp_path, monkeypatch):
    """A server that waits for its engine logs the same line every ten seconds."""
    log = tmp_path / "a.log"
    follower = Follower(log)
    for minute in range(10, 60):
        waits = f"INFO 11-21 14:{minute}:07 [core.py:7] Waiting for 1 engine for {minute * 60} s\n"
        append(log, waits.encode())
        follower.lines()
    assert len(follower.distinct) == 1
    append(log, b"Loading:  50% | 1/2 [00:10<00:10]\rLoading: 100% | 2/2 [00:20<00:00]\r")
    follower.lines()
    assert len(follower.distinct) == 3
    monkeypatch.setattr(logs, "MAX_DISTINCT", 100)
    append(log, b"".join(b"\rwaiting (%d)" % n for n in range(1000)))
    follower.lines()
    assert len(follower.distinct) == 100


def test_the_tail_ends_before_torchruns_report(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(
        "\n".join(["rank 1 says", "", STOPS, "rank 0 lost rank 1", FAILED, "Traceback of torchrun"])
        + "\n"
    )
    assert tail(log) == LogTail(["rank 1 says"], rank=1, exit_code=-9)


@pytest.mark.parametrize(("codes", "stops", "first"), [
    ({0: 1, 1: -9}, "", (1, -9)),  # torchrun saw rank 0 first, which failed because of rank 1
    ({0: 1, 1: -9}, STOPS, (0, 1)),  # torchrun sent the SIGKILL itself
    ({0: 1, 1: -6}, "", (0, 1)),
])  # fmt: skip
def test_a_rank_that_was_killed_failed_first(tmp_path, codes, stops, first):
    log = tmp_path / "a.log"
    summary = [
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {2961 + rank})"
        for rank, code in codes.items()
    ]
    log.write_text("\n".join(["rank 0 lost rank 1", stops, FAILED_0, *summary]) + "\n")
    assert tail(log) == LogTail(["rank 0 lost rank 1"], *first)


def test_the_tail_begins_at_this_attempt(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(f"first attempt\n{STOPS}\n{FAILED}\n")
    since = Follower(log).start_offset
    append(log, b"second attempt\n")
    assert tail(log, since) == LogTail(["second attempt"])
    assert tail(log).rank == 1
    assert tail(tmp_path / "none.log") == LogTail([])
    append(log, b"\xff line\n" * 200_000 + b"the end")
    assert tail(log, count=2).lines == ["\ufffd line", "the end"]


LOST = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"
ENGINE, WORKER = "(EngineCore pid=1) ERROR 11-21", "(Worker pid=2) ERROR 11-21"


@pytest.mark.parametrize(("lines", "error"), [
    ([f"{ENGINE} 14:00:00 [core.py:1000] EngineCore failed to start.",
      f'{ENGINE} 14:00:00 [core.py:1000]     raise ValueError("x")',
      f"{ENGINE} 14:00:00 [core.py:1000] ValueError: Free memory is less than desired"],
     "ValueError: Free memory is less than desired"),
    ([f"{WORKER} 14:02:15 [executor.py:948] WorkerProc failed to start.",
      f"{WORKER} 14:02:15 [executor.py:948] safetensors.SafetensorError: incomplete metadata",
      f"{ENGINE} 14:02:17 [core.py:1433] Exception: WorkerProc initialization failed due to an"],
     "safetensors.SafetensorError: incomplete metadata"),
    ([f"{ENGINE} 14:02:17 [core.py:1433] Exception: WorkerProc initialization failed due to an"],
     None),
    ([f"{ENGINE} 15:10:37 [executor.py:314] {LOST}, shutting down executor.",
      f"{ENGINE} 15:10:37 [core.py:1673] RuntimeError: cancelled"],
     LOST),
])  # fmt: skip
def test_the_error_that_ended_vllms_engine(lines, error):
    assert logs.root_cause(lines) == error
