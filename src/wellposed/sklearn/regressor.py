"""EquilibriumRegressor."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from wellposed.sklearn._estimator import AbstractEstimator

__all__ = ["EquilibriumRegressor"]


class EquilibriumRegressor(RegressorMixin, AbstractEstimator):
    r"""An equilibrium network for regression: y = v . z with z = f(z, x), trained on |y_hat - y|^2/2.

    Targets are shifted and scaled to mean 0 and variance 1 for the training; inputs are taken as they are, so put a
    `StandardScaler` before it. Trained by Adam on minibatches in float64. A network that is well-posed because it contracts
    is kept at |R| <= 0.95 after each step. When training or an equilibrium fails there is a `ConvergenceWarning` that says so.

        >>> import numpy as np, wellposed as wp
        >>> X = np.linspace(-1, 1, 20)[:, None]
        >>> model = wp.EquilibriumRegressor(width=16, random_state=0).fit(X, X[:, 0] ** 2)
        >>> model.predict(X).shape
        (20,)

    Args:
        family: "gaussian", "skip", "implicit_only", "monotone", "dense" or "opteq"; a class or function of (in_features,
            width, *, generator, dtype) such as `wp.DeepOptEq`; or a module such as an `EquilibriumLayer`, of which a copy is
            trained from where it is.
        width: Size of z; not used for a module.
        family_options: Further keywords of the family, e.g. `{"margin": 0.5}`.
        learning_rate: Of Adam.
        max_iter: Most epochs.
        batch_size: Samples a step.
        tol, n_iter_no_change: Training ends when the best loss has not fallen by `tol` for so many epochs.
        weight_decay: Of Adam.
        rtol: Tolerance of the equilibria in training, if the family does not bring its own; predictions are solved to 1e-12 in
            float64 and 1e-6 in float32.
        dtype: "float64" or "float32".
        certify: Whether `fit` looks for a certificate.
        random_state: Of the initialization and the order of the samples.

    Attributes:
        model_: The fitted network, on standardized targets.
        certificate_: What is proved: for theory networks `wp.certify` on the training data at the fitted parameters; for
            others existence and uniqueness of equilibria; None if nothing is known.
        certificate_reason_: What the certificate is about, or why there is none.
        n_iter_, loss_curve_: Epochs, and the mean loss of each.
        y_mean_, y_scale_: Of the targets.
    """

    def fit(self, X: Any, y: Any) -> EquilibriumRegressor:
        """Trains a new network.

        Args:
            X: (n, d). y: (n,).
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._start(X, y)
        self._fit(self._tensor(X), self._target(y))
        return self

    def partial_fit(self, X: Any, y: Any) -> EquilibriumRegressor:
        """One epoch on these samples; the first call makes the network, and fixes shift and scale of the targets.

        Args:
            X: (n, d). y: (n,).
        """
        first = not hasattr(self, "model_")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=first)
        if first:
            self._start(X, y)
        self._partial_fit(self._tensor(X), self._target(y))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(n, d) -> (n,)."""
        output = self._output(X).reshape(-1).double().numpy()
        return np.asarray(output * self.y_scale_ + self.y_mean_)

    def _start(self, X: np.ndarray, y: np.ndarray) -> None:
        self.y_mean_, scale = float(np.mean(y)), float(np.std(y))
        self.y_scale_ = scale if scale > 0 else 1.0
        self._begin(X.shape[1], None)

    def _target(self, y: np.ndarray) -> Tensor:
        return self._tensor((y - self.y_mean_) / self.y_scale_)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output.reshape(-1) - target).square().mean()
