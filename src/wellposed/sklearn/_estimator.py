"""What the two estimators share: parameters, the loop over epochs, the certificate, warnings."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from wellposed.certify import Certificate, certify
from wellposed.certify._dispatch import has_certificate
from wellposed.certify.own_layer import has_layers
from wellposed.certify.well_posedness import well_posed
from wellposed.descent._minibatch import TOTALS, MinibatchStep, epoch, solves
from wellposed.errors import InvalidArgument
from wellposed.nn import EquilibriumLayer
from wellposed.nn.families import is_theory_network
from wellposed.sklearn._families import Headed, build, contracting


def certificate_after_fit(model: nn.Module, X: Tensor, y: Tensor) -> tuple[Certificate | None, str]:
    """The certificate, and what it is about; None and the reason if there is none.

    Args:
        model: As it was fitted.
        X: (n, d) inputs. y: (n,) the targets that it was trained on.
    """
    if is_theory_network(model):
        about = "about training: descent or flow on |r|^2/2 from the fitted parameters, standardized targets"
        return certify(model, X, y), about
    inner = model.features if isinstance(model, Headed) else model
    if is_theory_network(inner):
        return well_posed(inner), "about equilibria: no theorem covers training with cross-entropy"
    if has_certificate(model) or has_layers(model):
        found = well_posed(model, X) if has_certificate(model) else certify(model)
        return found, f"about equilibria: no theorem covers training of {type(inner).__name__}"
    return None, f"{type(inner).__name__} holds no EquilibriumLayer, so there is no equilibrium to prove anything about"


#: Contractions are kept at most here, so that equilibria stay unique and solves stay short.
BOUND = 0.95


class SpectralProjection:
    """Keeps |R| <= 0.95 in the networks that are well-posed because they contract.

    A recurrent matrix outside of the ball is scaled to its surface.
    """

    def __init__(self, model: nn.Module) -> None:
        self._networks = contracting(model)

    @torch.no_grad()
    def apply(self) -> None:
        """Scales the matrices that are outside of the ball."""
        for network, parameter in self._networks:
            upper = network.contraction_upper(below=BOUND)
            if upper > BOUND:
                parameter.mul_(BOUND / upper)


DTYPES = {"float64": torch.float64, "float32": torch.float32}


class AbstractEstimator(BaseEstimator):
    """A network trained by Adam on minibatches; parameters as in `EquilibriumRegressor`."""

    model_: nn.Module
    certificate_: Certificate | None
    certificate_reason_: str

    def __init__(
        self,
        family: Any = "gaussian",
        width: int = 32,
        *,
        family_options: dict[str, Any] | None = None,
        learning_rate: float = 0.02,
        max_iter: int = 100,
        batch_size: int = 200,
        tol: float = 1e-3,
        n_iter_no_change: int = 10,
        weight_decay: float = 0.0,
        rtol: float = 1e-6,
        dtype: str = "float64",
        certify: bool = True,
        random_state: Any = None,
    ) -> None:
        self.family = family
        self.width = width
        self.family_options = family_options
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.weight_decay = weight_decay
        self.rtol = rtol
        self.dtype = dtype
        self.certify = certify
        self.random_state = random_state

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the loss over the samples."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        for name in ("width", "max_iter", "batch_size", "n_iter_no_change"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise InvalidArgument(f"{name} must be a positive integer; got {value!r}.")
        for name, least in (("learning_rate", "positive"), ("rtol", "positive"), ("tol", ""), ("weight_decay", "")):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not value >= 0 or (least and value == 0):
                raise InvalidArgument(f"{name} must be a {least or 'non-negative'} number; got {value!r}.")
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype must be 'float64' or 'float32'; got {self.dtype!r}.")

    def _begin(self, in_features: int, outputs: int | None) -> None:
        """A new network and optimizer, all randomness from `random_state`."""
        self._check_parameters()
        self._random = check_random_state(self.random_state)
        if isinstance(self.random_state, (np.random.RandomState, type(None))):  # a new stream, which can be pickled
            self._random = np.random.RandomState(self._random.randint(2**31 - 1))
        generator = torch.Generator().manual_seed(int(self._random.randint(2**31 - 1)))
        self.model_ = build(
            self.family,
            (in_features, int(self.width)),
            outputs,
            options=dict(self.family_options or {}),
            generator=generator,
            dtype=DTYPES[self.dtype],
        )
        SpectralProjection(self.model_).apply()
        trained = [p for p in self.model_.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=float(self.learning_rate), weight_decay=float(self.weight_decay))
        self.loss_curve_: list[float] = []
        self.n_iter_ = 0
        self.certificate_, self.certificate_reason_ = None, "training has not ended"  # not that of a network before

    def _train(self, X: Tensor, y: Tensor, epochs: int) -> str | None:
        """Trains with equilibria to `rtol`; what went wrong, or None."""
        layers = [module for module in self.model_.modules() if isinstance(module, EquilibriumLayer) and module.rtol is None]
        for layer in layers:
            layer.rtol = float(self.rtol)
        try:
            return self._epochs(X, y, epochs)
        finally:
            for layer in layers:
                layer.rtol = None  # predictions have the default tolerance of the dtype

    def _epochs(self, X: Tensor, y: Tensor, epochs: int) -> str | None:
        """Stops at a loss of 0, or if it has not fallen by `tol` for `n_iter_no_change` epochs."""
        model, projection = self.model_, SpectralProjection(self.model_)
        step = MinibatchStep(model, self._optimizer, lambda x, y: (self._loss(model(x), y), len(x)), project=projection.apply)
        best, since = np.inf, 0
        for _ in range(epochs):
            totals, failed = [0.0] * len(TOTALS), 0.0
            order = torch.from_numpy(self._random.permutation(len(X)))
            self.n_iter_ += 1
            for sums in epoch(lambda rows: step(X, y, rows), order.split(int(self.batch_size)), totals):
                if sums is None:
                    return f"the loss or a gradient was not finite in epoch {self.n_iter_}; take a smaller learning_rate"
                failed += float(sums[TOTALS.index("unconverged")]) + solves(self.model_, adjoint=True)[2]
            loss = totals[0] / totals[1]
            self.loss_curve_.append(loss)
            since = 0 if loss < best - float(self.tol) else since + 1
            best = min(best, loss)
            if since >= self.n_iter_no_change or loss == 0:  # as with one class: nothing is left to learn
                break
        first, much = self.loss_curve_[0], 2.0 if epochs > 1 else 10.0  # the parts of partial_fit differ among themselves
        if loss > much * first + float(self.tol):
            return (
                f"the loss rose from {first:.3g} to {loss:.3g} in {self.n_iter_} epochs, so training diverged; take a "
                f"smaller learning_rate than {self.learning_rate}"
            )
        if since < self.n_iter_no_change and loss > 0 and (epochs > 1 or self.max_iter == 1):
            return f"the loss still fell after max_iter={self.max_iter} epochs (now {loss:.3g}); raise max_iter"
        if failed:
            return (
                f"{failed:.0f} equilibria or adjoints of the last epoch did not converge to rtol={self.rtol}, so the gradients "
                "were not exact; loosen rtol or take another family"
            )
        return None

    def _fit(self, X: Tensor, y: Tensor) -> None:
        self._warn(self._train(X, y, int(self.max_iter)))
        if self.certify:
            self.certificate_, self.certificate_reason_ = certificate_after_fit(self.model_.eval(), X, y)
        else:
            self.certificate_, self.certificate_reason_ = None, "certify=False"

    def _partial_fit(self, X: Tensor, y: Tensor) -> None:
        self._warn(self._train(X, y, 1))
        self.certificate_, self.certificate_reason_ = None, "partial_fit sees a part of the data; a certificate is about all"

    def _warn(self, message: str | None) -> None:
        if message is not None:
            warnings.warn(f"{type(self).__name__}: {message}.", ConvergenceWarning, stacklevel=4)

    def _tensor(self, X: np.ndarray) -> Tensor:
        return torch.tensor(X, dtype=DTYPES[self.dtype])  # a copy: X may be read-only memory

    def _output(self, X: Any) -> Tensor:
        """(n, k) or (n,) outputs, with a warning if an equilibrium did not converge."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        self.model_.eval()
        with torch.no_grad():
            output: Tensor = self.model_(self._tensor(X))
        failed = solves(self.model_)[2]
        if failed:
            self._warn(
                f"{failed:.0f} of {len(X)} equilibria did not converge, and their predictions are not those of the network"
            )
        return output
