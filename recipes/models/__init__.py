"""Build, speed up, convert and merge models."""
