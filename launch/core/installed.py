"""Exit with one message if this Python does not have the environment.

Programs import this module before any other of ours.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("docker", "hydra", "omegaconf", "rich")

_missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if _missing:
    _venv = Path(__file__).parents[2] / ".venv"
    _activate = f"source {_venv}/bin/activate"
    _made = (_venv / "setup.json").is_file()
    print(
        f"{sys.executable} has no {', '.join(_missing)}: it is not the Python of this repository. "
        f"Use: {_activate if _made else 'make setup, then source .venv/bin/activate'}.",
        file=sys.stderr,
    )
    sys.exit(3)
