"""Check and list the model, data and adapter files that a run needs."""
