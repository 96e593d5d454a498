"""OptEq: equilibrium networks that minimise something, and say what.

`opteq.py`, `deep.py` and `conv.py` are the networks, `stages.py` what they are composed of, `objective.py` what their
equilibria minimise, `regularizers.py` and `prior.py` what may be preferred of these, `selection.py` which one is taken if
there are many, `constructions.py` the lemmas, `sensitivity.py` the numbers of a certificate.
"""

from wellposed.convex._dense import AbstractDenseOptEq
from wellposed.convex._network import AbstractOptEq
from wellposed.convex.blocks import AbstractBlock, RegularizerBlock, UnitBlock
from wellposed.convex.constructions import (
    MultiBlock,
    feedforward_as_deep_opteq,
    feedforward_as_units,
    line_of_equilibria,
    multi_block,
)
from wellposed.convex.conv import ConvOptEq
from wellposed.convex.deep import DeepOptEq
from wellposed.convex.objectives import Objective, WideObjective, blocks, inclusion_residual, objective, wide_limit
from wellposed.convex.opteq import OptEq
from wellposed.convex.prior import AbstractPrior, GradientStep, ProxStep
from wellposed.convex.prox import primitive_conjugate, value_range
from wellposed.convex.regularizers import L1, AbstractRegularizer, Box, Decorrelation, GroupL1, InverseNorm, SquaredL2
from wellposed.convex.selection import Schedule, Selection, select_equilibrium, sequential_averaging
from wellposed.convex.sensitivity import OptEqSensitivity

__all__ = [
    "AbstractBlock",
    "AbstractDenseOptEq",
    "AbstractOptEq",
    "AbstractPrior",
    "AbstractRegularizer",
    "Box",
    "ConvOptEq",
    "Decorrelation",
    "DeepOptEq",
    "GradientStep",
    "GroupL1",
    "InverseNorm",
    "L1",
    "MultiBlock",
    "Objective",
    "OptEq",
    "OptEqSensitivity",
    "ProxStep",
    "RegularizerBlock",
    "Schedule",
    "Selection",
    "SquaredL2",
    "UnitBlock",
    "WideObjective",
    "blocks",
    "feedforward_as_deep_opteq",
    "feedforward_as_units",
    "inclusion_residual",
    "line_of_equilibria",
    "multi_block",
    "objective",
    "primitive_conjugate",
    "select_equilibrium",
    "sequential_averaging",
    "value_range",
    "wide_limit",
]
