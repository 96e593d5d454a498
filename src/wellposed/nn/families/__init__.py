"""The networks of the papers, with their letters."""

from wellposed.nn.families._network import AbstractContraction, AbstractNetwork
from wellposed.nn.families._norm_bound import NormBound
from wellposed.nn.families.gaussian import GaussianDEQ
from wellposed.nn.families.implicit_only import ImplicitOnlyDEQ
from wellposed.nn.families.monotone import MonotoneDEQ
from wellposed.nn.families.skip import SkipDEQ

__all__ = ["AbstractContraction", "AbstractNetwork", "GaussianDEQ", "ImplicitOnlyDEQ", "MonotoneDEQ", "NormBound", "SkipDEQ"]
