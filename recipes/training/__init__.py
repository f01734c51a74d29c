"""Train: the loop, optimizer steps, checkpoints and the choice of the best model."""
