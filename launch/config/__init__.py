"""Turn the words of a command into one complete configuration."""
