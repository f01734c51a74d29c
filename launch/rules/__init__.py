"""What cannot work: the rows of check.py's table, one file a subject, and what the files on this host must be."""
