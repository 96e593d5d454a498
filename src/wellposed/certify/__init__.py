"""Certificates: from a model and data to a proof, or an honest 'not proved'.

The package is itself the function that most people need: `wellposed.certify(model, X, y)`.
"""

import sys
import types
from typing import Any

from torch import Tensor

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._dispatch import certify
from wellposed.certify._measure import Measurement
from wellposed.certify._own import OwnTheorem
from wellposed.certify._sensitivity import Contractive
from wellposed.certify.generalization import GeneralizationBound, generalization_bound
from wellposed.certify.lipschitz import LipschitzBounds, NetworkLipschitz, lipschitz_lower, lipschitz_upper
from wellposed.certify.monitor import CertificateMonitor
from wellposed.certify.radius_certificate import radius
from wellposed.certify.robust_balls import Robustness, robustness
from wellposed.certify.suggestions import Suggestion, Suggestions, suggest
from wellposed.certify.theorems.gao2022 import gao2022
from wellposed.certify.theorems.gao2023 import gao2023
from wellposed.certify.theorems.ling2022 import ling2022
from wellposed.certify.theorems.nguyen2022 import nguyen2022
from wellposed.certify.well_posedness import contraction, monotone, perron_frobenius
from wellposed.convex import AbstractDenseOptEq
from wellposed.nn import AbstractNetwork, AbstractSensitivity, DescentBounds, JacobianBounds

__all__ = [
    "AbstractSensitivity",
    "Certificate",
    "CertificateMonitor",
    "Contractive",
    "DescentBounds",
    "GeneralizationBound",
    "Hypothesis",
    "JacobianBounds",
    "LipschitzBounds",
    "Measurement",
    "NetworkLipschitz",
    "Robustness",
    "Suggestion",
    "Suggestions",
    "Verdict",
    "certify",
    "contraction",
    "gao2022",
    "gao2023",
    "generalization_bound",
    "ling2022",
    "lipschitz_lower",
    "lipschitz_upper",
    "monotone",
    "nguyen2022",
    "perron_frobenius",
    "radius",
    "robustness",
    "suggest",
]


class _CallablePackage(types.ModuleType):
    """So that `wp.certify(model, X, y)` and `wp.certify.suggest` both work."""

    def __call__(
        self,
        model: AbstractNetwork | AbstractDenseOptEq,
        X: Tensor,
        y: Tensor,
        *,
        theorem: str | OwnTheorem = "auto",
        **options: Any,
    ) -> Certificate:
        return certify(model, X, y, theorem=theorem, **options)

    def __dir__(self) -> list[str]:
        """The public names, without what this file imports."""
        return list(__all__)


_CallablePackage.__call__.__doc__ = certify.__doc__
__doc__ = f"{__doc__}\n{certify.__doc__}"
sys.modules[__name__].__class__ = _CallablePackage
