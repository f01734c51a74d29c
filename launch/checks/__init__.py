"""The checks of launch/doctor.py: functions from Facts to a Finding, listed in checks.yaml."""
