"""What is proved about a fitted estimator."""

from __future__ import annotations

from torch import Tensor, nn

from wellposed.certify import Certificate, certify, contraction, monotone
from wellposed.certify._any_model import certificate_of, has_certificate
from wellposed.nn import AbstractNetwork, MonotoneDEQ
from wellposed.sklearn._families import Headed

__all__ = ["certificate_after_fit"]


def certificate_after_fit(model: nn.Module, X: Tensor, y: Tensor) -> tuple[Certificate | None, str]:
    """The certificate, and what it is about; None and the reason if there is none.

    Args:
        model: As it was fitted.
        X: (n, d) inputs. y: (n,) the targets that it was trained on.
    """
    if isinstance(model, AbstractNetwork):
        return certify(
            model, X, y
        ), "about training: descent or flow on |r|^2/2 from the fitted parameters, standardized targets"
    inner = model.features if isinstance(model, Headed) else model
    if isinstance(inner, AbstractNetwork):
        found = monotone(inner) if isinstance(inner, MonotoneDEQ) else contraction(inner)
        return found, "about equilibria: no theorem covers training with cross-entropy"
    if has_certificate(model):
        return certificate_of(model, X, y), f"about equilibria: no theorem covers training of {type(inner).__name__}"
    return None, f"no theorem is known for {type(inner).__name__}"
