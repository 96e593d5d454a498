"""Differentiating: how a cotangent passes through an equilibrium."""

from wellposed.implicit._gradient import AbstractGradient, Context
from wellposed.implicit._pullback import AbstractPullback, AbstractStructuredMap, AdjointMap, JacobianPullback
from wellposed.implicit.exact import ImplicitGradient
from wellposed.implicit.phantom import JacobianFree, PhantomGradient
from wellposed.implicit.unrolled import UnrolledGradient

__all__ = [
    "AbstractGradient",
    "AbstractPullback",
    "AbstractStructuredMap",
    "AdjointMap",
    "Context",
    "ImplicitGradient",
    "JacobianFree",
    "JacobianPullback",
    "PhantomGradient",
    "UnrolledGradient",
]
