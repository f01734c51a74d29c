"""Compute rewards, and combine them in a verifier."""
