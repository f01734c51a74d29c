"""Run every rank under a profiler of ROCm (profile=rocprof), which writes into the run's profile/.

The profiler goes inside torchrun, as AMD advises for launchers of ranks (rocprofiler-sdk, "Using
rocprofv3 with MPI"). Around it, it would watch torchrun itself and name each rank's output by
process id only. Options, all from rocm.docs.amd.com:

- rocprofv3: rocprofiler-sdk, "rocprofv3 command-line options" and "I/O control options"
  (%env{NAME}% in names of files)
- rocprof-compute: rocprofiler-compute, "Profile mode" and "Basic usage"
  (--path: ROCm 7.13 still takes it and prefers --output-directory)
- rocprof-sys-sample: rocprofiler-systems, "Sampling the call stack" and "Understanding the
  Systems Profiler output"
"""

from __future__ import annotations

from pathlib import Path

from launch.schema import Config
from launch.schema.enums import Profile, Rocprof

RANK = "rank%env{RANK}%"  # torchrun sets RANK; %rank% would be the rank of Slurm or MPI


def wrapped(config: Config, run_dir: Path, python: str, rank: list[str]) -> list[str]:
    """Return torchrun's last arguments.

    They are `rank` (-m <module> ...) itself, or under the profiler.
    """
    if config.profile != Profile.rocprof:
        return rank
    profiler = [config.rocprof.value, *options(config.rocprof, run_dir / "profile")]
    return ["--no-python", *profiler, "--", python, *rank]


def options(program: Rocprof, folder: Path) -> list[str]:
    if program == Rocprof.compute:
        return ["profile", "--name", "run", "--path", str(folder / "rocprof-compute")]
    if program == Rocprof.sys:
        return ["--trace", "--output", str(folder), RANK]
    # Trace HIP, RCCL, kernels and copies; pftrace opens at ui.perfetto.dev, and --stats adds a
    # table of kernels as CSV.
    names = ["--output-directory", str(folder), "--output-file", RANK]
    return ["--runtime-trace", "--stats", *names, "--output-format", "pftrace", "csv"]
