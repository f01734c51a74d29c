"""Start, stop and coordinate ranks, independent of the method."""
