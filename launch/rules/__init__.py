"""What cannot work by the composition and conf/: the rows of check.py's table, one file a subject."""
