"""Training runs: configuration, networks by name, the loop, checkpoints, the run directory."""
