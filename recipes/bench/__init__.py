"""Benchmarks, which measure series of cases and show published figures next to the results."""
