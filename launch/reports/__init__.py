"""Build the page of launch/report.py: data reads runs, one/many/sweeps fill it, page renders it."""
