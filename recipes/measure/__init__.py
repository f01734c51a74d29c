"""Measure runs and GPUs: metrics, telemetry, profiles and health."""
