"""Run several runs together: sweeps and pipelines."""
