"""The networks of the papers, with their letters."""

from wellposed.nn.models._network import AbstractContraction, AbstractNetwork
from wellposed.nn.models._norm_bound import NormBound
from wellposed.nn.models.gaussian import GaussianDEQ
from wellposed.nn.models.implicit_only import ImplicitOnlyDEQ
from wellposed.nn.models.monotone import MonotoneDEQ
from wellposed.nn.models.skip import SkipDEQ

__all__ = ["AbstractContraction", "AbstractNetwork", "GaussianDEQ", "ImplicitOnlyDEQ", "MonotoneDEQ", "NormBound", "SkipDEQ"]
