"""Trainers, their steps and checkpoints."""
