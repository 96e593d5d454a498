"""Tasks end to end: baselines, training, tables."""
