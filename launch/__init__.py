"""Compose, check, plan, run and record on the host. Nothing here imports torch.

The programs are run.py, doctor.py, report.py, reproduce.py and chat.py. The packages follow in the
order in which a run uses them. import-linter checks that each imports only from those above it:

core       errors and exit codes, similar names, JSON files
schema     the typed configuration that conf/ fills, and the types that modules exchange
machine    this host's GPUs, visibility masks, and the placement of processes on GPUs
inputs     the model, data and adapter files that a run needs
estimate   memory and time of a run, from shapes alone
config     turns a command's overrides into one complete configuration
rules      reject settings that cannot work, one file per subject
plan       run directory, processes, their environment and containers
search     searches over plans: find=, settings that would fit or be faster
execution  executes a plan: starts, supervises, stops and records its processes
checks     the checks of doctor.py
study      several runs: sweeps and pipelines
reports    the HTML page of report.py
"""
