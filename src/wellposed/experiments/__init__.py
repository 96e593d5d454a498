"""Experiments: from a configuration to data, a model, and a run directory."""

__all__: list[str] = []
