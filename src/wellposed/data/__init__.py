"""Data sets: built in, from files, or from OpenML, with what was done to them."""

from wellposed.data._load import Dataset, load

__all__ = ["Dataset", "load"]
