"""What cannot work by the composition alone: the rows of check.py's table, one file a subject."""
