"""Measures the GPUs of a machine for launch/doctor.py."""
