"""Exit with code 75 on a stop signal that arrives before anything was started."""

import os
import signal

from launch.core.errors import EXIT_INTERRUPTED

# A closed terminal sends SIGHUP. Schedulers send SIGUSR1 or SIGUSR2 before the time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
is_importing = False  # whether a program has not yet called its main function
is_exiting = False  # whether a stop signal ended the program before it started anything
has_started = False  # whether something was started, so that its exit code matters


def handled() -> list[signal.Signals]:
    """Return the stop signals that are not ignored; nohup makes its child ignore SIGHUP."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def install() -> None:
    """Handle stop signals. Programs call this before their other imports, which take a second."""
    global is_importing
    is_importing = True
    for number in handled():
        signal.signal(number, exit_now)


def exit_now(_number: int, _frame: object) -> None:
    """Exit; at the end of a run, do nothing, because only its exit code is left to return."""
    global is_exiting
    if has_started:
        return
    is_exiting = True
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:  # noqa: SIM105 - contextlib takes most of the time before signals are handled
        os.write(2, b"Interrupted: nothing was started.\n")  # may interrupt a print()
    except OSError:  # stderr is closed
        pass
    if is_importing:  # class bodies and weakref callbacks replace or drop exceptions
        os._exit(EXIT_INTERRUPTED)
    raise SystemExit(EXIT_INTERRUPTED)
