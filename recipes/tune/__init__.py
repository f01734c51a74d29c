"""Programs that help to choose settings and do not train a model to keep."""
