"""Search over plans for find=, for changes that make a run fit, and for faster settings."""
