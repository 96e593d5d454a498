"""A training run: configuration, data and network by name, the loop, checkpoints, the run directory."""
