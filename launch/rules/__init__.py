"""Reject what cannot work, by the rows of check.py's table, one file per subject."""
