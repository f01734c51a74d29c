"""What launch/doctor.py checks: one module a subject, each check a function from Facts to a Finding; table.py lists them."""
