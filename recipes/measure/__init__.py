"""Metrics, telemetry, profiles and health checks."""
