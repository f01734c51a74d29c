"""Reject compositions that cannot work. check.py lists the rules; each subject has a file."""
