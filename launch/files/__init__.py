"""Files of a run on the host: its directory, the models and data that it reads, and caches that outlive it."""
