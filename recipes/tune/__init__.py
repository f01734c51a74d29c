"""Programs that help to choose settings; they produce no model."""
