"""The networks of the papers, with their letters. One file is one family: its equation, its kernel,
its `Theory`."""

from wellposed.nn.families._contraction import AbstractContraction, NormBound
from wellposed.nn.families._network import AbstractNetwork
from wellposed.nn.families.gaussian import GaussianDEQ
from wellposed.nn.families.implicit_only import ImplicitOnlyDEQ
from wellposed.nn.families.monotone import MonotoneDEQ
from wellposed.nn.families.skip import SkipDEQ
from wellposed.nn.families.theory import Theory, is_theory_network, may_be_ill_posed, theory_of

__all__ = [
    "AbstractContraction",
    "AbstractNetwork",
    "FAMILIES",
    "GaussianDEQ",
    "ImplicitOnlyDEQ",
    "MonotoneDEQ",
    "NormBound",
    "SkipDEQ",
    "Theory",
    "is_theory_network",
    "may_be_ill_posed",
    "theory_of",
]

#: The families by name. A new family is a file of this folder and a line here.
FAMILIES: dict[str, type[AbstractNetwork]] = {
    "gaussian": GaussianDEQ,
    "implicit_only": ImplicitOnlyDEQ,
    "monotone": MonotoneDEQ,
    "skip": SkipDEQ,
}
