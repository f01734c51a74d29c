"""Generate completions, locally or with a server, and select samples."""
