"""Trials of a sweep: which come next, where they run, and what they add up to."""
