"""Provide what every rank needs, independent of the method."""
