"""Completions: generated locally or by a server, or read from files."""
