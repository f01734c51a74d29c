"""Exit with code 3 and one message if packages of the environment are missing.

Programs import this module before our other modules, which need those packages.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("docker", "hydra", "omegaconf", "rich")

_missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if _missing:
    _venv = Path(__file__).parents[2] / ".venv"
    _activate = f"source {_venv}/bin/activate"
    _is_set_up = (_venv / "setup.json").is_file()
    print(
        f"{sys.executable} has no {', '.join(_missing)}, so it is not the Python of this "
        f"repository. Use: {_activate if _is_set_up else 'make setup, then ' + _activate}.",
        file=sys.stderr,
    )
    sys.exit(3)
