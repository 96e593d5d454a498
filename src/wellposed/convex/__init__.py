"""OptEq: equilibrium networks that minimise a function, and that function.

`opteq.py` and `conv.py` are the networks, `stages.py` what they are composed of, `objectives.py`
what their equilibria minimise, `regularizers.py` what may be preferred of these, `selection.py`
which one is taken if there are many, `constructions.py` the lemmas, `sensitivity.py` the numbers of
a certificate.
"""

from wellposed.convex.constructions import line_of_equilibria
from wellposed.convex.conv import ConvOptEq
from wellposed.convex.objectives import inclusion_residual, objective, wide_limit
from wellposed.convex.opteq import DeepOptEq, OptEq
from wellposed.convex.regularizers import L1, Box, Decorrelation, GroupL1, InverseNorm, SquaredL2
from wellposed.convex.selection import select_equilibrium
from wellposed.convex.stages import GradientStep, ProxStep

__all__ = [
    "Box",
    "ConvOptEq",
    "Decorrelation",
    "DeepOptEq",
    "GradientStep",
    "GroupL1",
    "InverseNorm",
    "L1",
    "OptEq",
    "ProxStep",
    "SquaredL2",
    "inclusion_residual",
    "line_of_equilibria",
    "objective",
    "select_equilibrium",
    "wide_limit",
]
