"""Define the exit codes, and errors that users see as one message without a traceback."""

import errno
from collections.abc import Iterable

# Comments of the exit codes become docs/reference/exit_codes.md.

EXIT_DONE = 0  # The run is done, or the plan is printed.
EXIT_USER = 2  # The configuration or an input is wrong. Nothing was started, or a rank rejected it.
EXIT_HOST = 3  # This host cannot run it: a GPU, an image, a package or space is missing.
EXIT_FAILED = 4  # A process failed, or a benchmark is below `method.args.fail_below`.
EXIT_HUNG = 5  # Nothing progressed for `runtime.hang_timeout_s`, and the run was stopped.
# Interrupted by Ctrl-C or a signal, after saving. Run the same command again to resume. The number
# is EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75

MORE_SPACE = "Free space there and repeat the command, or use run_root=<directory on a larger disk>"
REMEDIES = {
    errno.ENOSPC: MORE_SPACE,
    errno.EDQUOT: MORE_SPACE,
    errno.EFBIG: "Use `ulimit -f unlimited` before the command",
    errno.EROFS: "Use run_root=<directory that you can write to>",
}


class UserError(Exception):
    """The configuration is wrong."""

    exit_code = EXIT_USER


class HostError(Exception):
    """The configuration is right, but this host cannot run it."""

    exit_code = EXIT_HOST


def os_error_text(error: OSError, default_path: str = "this machine") -> str:
    """Return the path and the reason of an OSError; `default_path` replaces a missing path."""
    path = error.filename2 or error.filename or default_path  # filename2: the target of a rename
    remedy = REMEDIES.get(error.errno or 0)
    return f"{path}: {error.strerror or error}" + (f". {remedy}." if remedy else "")


def near(name: str, options: Iterable[str]) -> str:
    """Return ' Did you mean a, b?', or '' if no option resembles `name`."""
    import difflib  # its import takes a tenth of the time before stop signals are handled

    options = sorted(set(options))
    names = (
        [option for option in options if option.startswith(f"{name}_")]
        or difflib.get_close_matches(name, options, n=3, cutoff=0.65)
        or [option for option in options if name and option.startswith(name)]
    )
    return f" Did you mean {', '.join(names[:3])}?" if names else ""


def near_or_all(name: str, options: Iterable[str]) -> str:
    """Return the hint of near(). If no option is similar, list all, provided there are few."""
    options = sorted(set(options))
    known = f" Known: {', '.join(options)}." if len(options) <= 12 else ""
    return near(name, options) or known
