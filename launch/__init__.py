"""Host side: compose a configuration, check it, plan it, run it, record it. Imports no torch."""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("docker", "hydra", "omegaconf", "rich")

# Here, before any of them is imported: whoever forgets the environment is told, by whatever program.
_missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    _venv = Path(__file__).parents[1] / ".venv"
    _remedy = f"source {_venv}/bin/activate" if (_venv / "setup.json").is_file() else "make setup, then source .venv/bin/activate"
    print(f"{sys.executable} has no {', '.join(_missing)}: it is not the Python of this repository. Use: {_remedy}.", file=sys.stderr)
    sys.exit(3)
