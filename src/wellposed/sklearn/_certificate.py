"""What is proved about a fitted estimator."""

from __future__ import annotations

from torch import Tensor, nn

from wellposed.certify import Certificate, certify
from wellposed.certify._dispatch import has_certificate
from wellposed.certify.well_posedness import well_posed
from wellposed.nn.families import is_theory_network
from wellposed.sklearn._families import Headed

__all__ = ["certificate_after_fit"]


def certificate_after_fit(model: nn.Module, X: Tensor, y: Tensor) -> tuple[Certificate | None, str]:
    """The certificate, and what it is about; None and the reason if there is none.

    Args:
        model: As it was fitted.
        X: (n, d) inputs. y: (n,) the targets that it was trained on.
    """
    if is_theory_network(model):
        return certify(
            model, X, y
        ), "about training: descent or flow on |r|^2/2 from the fitted parameters, standardized targets"
    inner = model.features if isinstance(model, Headed) else model
    if is_theory_network(inner):
        return well_posed(inner), "about equilibria: no theorem covers training with cross-entropy"
    if has_certificate(model):
        return well_posed(model, X), f"about equilibria: no theorem covers training of {type(inner).__name__}"
    return None, f"no theorem is known for {type(inner).__name__}"
