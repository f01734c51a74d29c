"""Turn a command's overrides into one complete configuration."""
