"""Turn the overrides of a command into one complete configuration."""
