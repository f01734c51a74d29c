"""Predict a run's memory and time from shapes alone."""
