"""Host side: compose a configuration, check it, plan it, run it, record it. Imports no torch.

Programs: run.py, doctor.py, report.py, reproduce.py. Rooms, in the order of a run; each imports
only from those above it (import-linter checks that):

core       errors and exit codes, near names, JSON files
schema     the typed configuration that conf/ fills, and the types that modules exchange
machine    this host's GPUs, the masks that choose among them, and which process gets which
inputs     the model, data and adapter files that a run needs
estimate   memory and time of a run, from shapes alone
config     from a command's overrides to one complete configuration
rules      what cannot work, one file per subject
plan       run directory, processes, their environment and containers
search     searches over plans: find=, what would fit, what would be faster
execution  from a plan to an exit code: start, supervise, stop, record
checks     what doctor.py looks at
study      several runs: sweeps and pipelines
reports    the page of report.py
"""
