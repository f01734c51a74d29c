"""Turn a plan into processes and an exit code."""
