"""Files of a run on the host: its directory, the models and data that it reads, what is wrong with them, and caches."""
