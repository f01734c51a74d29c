"""Programs that help to choose settings. They train nothing."""
