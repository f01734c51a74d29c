"""Run a rank under rocprof-compute, and then its analysis, for profile=rocprof rocprof=compute.

    python -m recipes.measure.compute_profile <folder> -- <command of the rank>

The counters go to <folder>/rocprof-compute, and the tables of `rocprof-compute analyze` to
<folder>/analysis.txt. Sources: rocprofiler-compute, "Profile mode" and "CLI analysis" on
rocm.docs.amd.com (ROCm 7.13 still accepts --path and prefers --output-directory).
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "rocprof-compute"


def main(folder: Path, command: Sequence[str]) -> int:
    """Return the exit code of the profiled command. A failed analysis only prints a line."""
    # The signal reaches the children too. Wait for them, because they save.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    counters = folder / PROGRAM
    path = ["--path", str(counters)]
    code = subprocess.call([PROGRAM, "profile", "--name", "run", *path, "--", *command])
    if code == 0:
        # Some versions add a folder with the name of the GPU.
        system = next(iter(sorted(counters.rglob("sysinfo.csv*"))), None)
        print(analyze(system.parent if system else counters, folder / "analysis.txt"))
    return code


def analyze(counters: Path, out: Path) -> str:
    """Write the analysis to `out`, and return the line that reports it."""
    argv = [PROGRAM, "analyze", "--path", str(counters)]
    with out.open("w") as file:
        code = subprocess.call(argv, stdout=file, stderr=subprocess.STDOUT)
    if code:
        # Since ROCm 10.2, only the analysis needs packages, in an environment of their own.
        lines = out.read_text().strip().splitlines()
        return f"{' '.join(argv)} failed ({lines[-1] if lines else code}). Repeat it elsewhere."
    return f"profile: {out}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
