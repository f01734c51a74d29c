"""Processes while they run: started in order, watched, stopped together, and what their last lines mean."""
