"""Compute from a configuration and a host everything that will run."""
