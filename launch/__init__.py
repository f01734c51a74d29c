"""Host side: compose a configuration, check it, plan it, run it, record it. Imports no torch.

Programs: run.py, doctor.py, report.py, reproduce.py. Stages of a run: compose.py, check.py, plan.py, execute.py, record.py. Several runs:
pipeline.py, sweep.py. What makes a composition complete: auto.py, smoke.py, tuned.py, batch.py, lr_scaling.py, trainer_args.py. What makes
processes of it: topology.py, environment.py. What a person sees: show.py, preview.py, errors.py. Folders:

command_line  what a person may write, and what is said to one who mistypes it
schema        the typed configuration that every YAML of conf/ fills
rules         what cannot work, one file a subject, by the composition and conf/ alone; check.py puts the rows into one table
machine       this host's GPUs, and the masks that choose among them
checks        the doctor's: what doctor.py looks at, one module a subject
planner       memory and time of a run from shapes alone
runtimes      where processes run: here, in containers, as a job of Slurm
supervision   processes while they run: started, watched, stopped together
files         run directories, models, data, caches; what is wrong with a file that a run needs
pipelines     phases after one another, RAFT's cycles among them
sweeps        trials: which come next, where they run, what they add up to
reports       the page of report.py
"""

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
