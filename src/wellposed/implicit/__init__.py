"""Differentiating: how a cotangent passes through an equilibrium."""

from wellposed.implicit._attached import attach_gradient
from wellposed.implicit.gradient import AbstractGradient
from wellposed.implicit.implicit_gradient import ImplicitGradient
from wellposed.implicit.inexact import JacobianFree, PhantomGradient, UnrolledGradient
from wellposed.implicit.reversible import ReversibleGradient

__all__ = [
    "AbstractGradient",
    "ImplicitGradient",
    "JacobianFree",
    "PhantomGradient",
    "ReversibleGradient",
    "UnrolledGradient",
    "attach_gradient",
]
