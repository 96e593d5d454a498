"""Proofs that plain gradient descent, from its very start, ends at zero loss.

The package is itself the function that most users need: `wellposed.prove(model, X, y)`.
"""

import sys
from typing import cast

from wellposed.prove._prove import ProvePackage, prove
from wellposed.prove.proof import Proof
from wellposed.prove.verification import Verification, verify

__all__ = ["Proof", "Verification", "prove", "verify"]

__doc__ = f"{__doc__}\n{prove.__doc__}"
sys.modules[__name__].__class__ = ProvePackage
#: This package, with the type that can be called; `wellposed.prove` is it.
package = cast(ProvePackage, sys.modules[__name__])
