"""Search over plans: find=, what would fit, what would be faster."""
