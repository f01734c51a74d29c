"""List the programs and packages that some settings need besides the locked packages.

containers/images.lock.yaml states which image has them. A run that needs one looks for it on this
machine or in the image before it starts.
"""

from __future__ import annotations

import json
from typing import NamedTuple

PRESENT = "present"


class Tool(NamedTuple):
    install: str
    program: str = ""  # on the PATH, if its name is not the tool's
    module: str = ""  # of a Python package


PROFILER = "apt install {} (from ROCm 7.14 on: amdrocm-profiler)"
TOOLS = {
    "rocprofv3": Tool(PROFILER.format("rocprofiler-sdk")),
    "rocprof-compute": Tool(PROFILER.format("rocprofiler-compute")),
    "rocprof-sys-sample": Tool(PROFILER.format("rocprofiler-systems")),
    "hipblaslt-bench": Tool("build the clients of hipBLASLt from source"),
    "rccl-tests": Tool("build ROCm/rccl-tests with MPI=1", program="all_reduce_perf"),
    "ck4inductor": Tool(
        "pip install git+https://github.com/ROCm/composable_kernel@develop", module="ck4inductor"
    ),
}
# Prints the missing tools as JSON. Its arguments are PLACES.
SCRIPT = """
import importlib.util, json, shutil, sys
places = json.loads(sys.argv[1])
find = lambda program, module: importlib.util.find_spec(module) if module else shutil.which(program)
print(json.dumps([name for name, place in places.items() if not find(*place)]))
"""


def argv(names: list[str]) -> list[str]:
    """Return a command that prints which of the tools are missing where it runs."""
    places = {name: (TOOLS[name].program or name, TOOLS[name].module) for name in names}
    return ["python3", "-c", SCRIPT, json.dumps(places)]
