"""Data sets: built in, from files, or from OpenML, with what was done to them."""

from wellposed.data._dataset import Dataset
from wellposed.data._load import load

__all__ = ["Dataset", "load"]
