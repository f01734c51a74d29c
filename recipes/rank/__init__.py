"""Provide what every rank needs, whatever it computes."""
