"""Certificates: from a model and data to a proof, or an honest 'not proved'.

The package is itself the function that most users need: `wellposed.certify(model, X, y)`.
"""

import sys
from typing import cast

from wellposed.certify._dispatch import CertifyPackage, certify
from wellposed.certify._sensitivity import Contractive
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict
from wellposed.certify.generalization import generalization_bound
from wellposed.certify.lipschitz import lipschitz_lower, lipschitz_upper
from wellposed.certify.monitor import CertificateMonitor
from wellposed.certify.radius_certificate import radius
from wellposed.certify.robust_balls import robustness
from wellposed.certify.suggestions import suggest
from wellposed.certify.theorems.gao2022 import gao2022
from wellposed.certify.theorems.gao2023 import gao2023
from wellposed.certify.theorems.ling2022 import ling2022
from wellposed.certify.theorems.nguyen2022 import nguyen2022
from wellposed.certify.well_posedness import contraction, monotone, perron_frobenius
from wellposed.nn.sensitivity import AbstractSensitivity

__all__ = [
    "AbstractSensitivity",
    "Certificate",
    "CertificateMonitor",
    "Contractive",
    "Hypothesis",
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

__doc__ = f"{__doc__}\n{certify.__doc__}"
sys.modules[__name__].__class__ = CertifyPackage
#: This package, with the type that can be called; `wellposed.certify` is it.
package = cast(CertifyPackage, sys.modules[__name__])
