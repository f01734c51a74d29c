"""What a person may write on a command line, and what is said to one who mistypes it."""
