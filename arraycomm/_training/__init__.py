"""Data-parallel training: gradients, optimizers, metrics and data."""
