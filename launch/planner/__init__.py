"""Memory and time of a run from shapes alone, and what would make it fit."""
