"""What two or more recipes share."""
