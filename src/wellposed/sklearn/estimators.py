"""EquilibriumClassifier and EquilibriumRegressor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.sklearn._estimator import AbstractEstimator


class EquilibriumClassifier(ClassifierMixin, AbstractEstimator):
    r"""A classifier: softmax(V z + v) with z = f(z, x), trained on cross-entropy.

        >>> import numpy as np, wellposed as wp
        >>> X = np.linspace(-1, 1, 20)[:, None]
        >>> model = wp.EquilibriumClassifier("dense", 16, random_state=0).fit(X, X[:, 0] ** 2 > 0.3)
        >>> model.predict_proba(X).shape
        (20, 2)

    Args:
        family: As in `EquilibriumRegressor`; of a theory network the equilibria are used, with a
            new read-out.
        width, family_options, learning_rate, max_iter, batch_size: As in `EquilibriumRegressor`.
        tol, n_iter_no_change, weight_decay, rtol, dtype, certify, random_state: As there.

    Attributes:
        classes_: (k,) the labels.
        model_: The fitted network, X -> logits.
        certificate_: About existence and uniqueness of equilibria; None for a module without an
            `EquilibriumLayer`. No theorem of the papers is about training with cross-entropy.
        certificate_reason_: What the certificate is about, or why there is none.
        n_iter_, loss_curve_: Epochs, and the mean loss of each.
    """

    def fit(self, X: Any, y: Any) -> EquilibriumClassifier:
        """Trains a new network on (n, d) inputs and (n,) labels of any kind."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        self._begin(X.shape[1], len(self.classes_))
        self._fit(self._tensor(X), self._target(y))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> EquilibriumClassifier:
        """One epoch on (n, d) inputs and (n,) labels; the first call makes the network.

        Args:
            X, y: The samples.
            classes: (k,) all labels of all calls; the first call needs it.
        """
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise InvalidArgument("The first call of partial_fit needs classes=, all labels of all calls.")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = unique_labels(classes)
            self._begin(X.shape[1], len(self.classes_))
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise InvalidArgument(f"classes={list(classes)} is not what the first call had, {list(self.classes_)}.")
        self._partial_fit(self._tensor(X), self._target(y))
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """(n, k) logits; for two classes (n,) their difference, positive for `classes_[1]`."""
        logits = self._output(X).double()
        return np.asarray((logits[:, 1] - logits[:, 0]) if len(self.classes_) == 2 else logits)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, d) -> (n, k)."""
        return np.asarray(torch.softmax(self._output(X).double(), dim=1))

    def predict(self, X: Any) -> np.ndarray:
        """(n, d) -> (n,) labels."""
        winners = self._output(X).argmax(dim=1).numpy()
        return np.asarray(self.classes_[winners])

    def _target(self, y: np.ndarray) -> Tensor:
        unknown = sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise InvalidArgument(f"y has the labels {unknown}, which are not among the classes {self.classes_.tolist()}.")
        return torch.tensor(np.searchsorted(self.classes_, y))

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum")


class EquilibriumRegressor(RegressorMixin, AbstractEstimator):
    r"""Regression by an equilibrium network: y = v . z, z = f(z, x), trained on |y_hat - y|^2/2.

    Targets are shifted and scaled to mean 0 and variance 1 for the training; inputs are not, so put
    a `StandardScaler` before it. Adam trains on minibatches. A network that is well-posed because
    it contracts is projected to |R| <= 0.95 after each step. A `ConvergenceWarning` reports a
    training or an equilibrium that fails.

        >>> import numpy as np, wellposed as wp
        >>> X = np.linspace(-1, 1, 20)[:, None]
        >>> model = wp.EquilibriumRegressor(width=16, random_state=0).fit(X, X[:, 0] ** 2)
        >>> model.predict(X).shape
        (20,)

    Args:
        family: "gaussian", "skip", "implicit_only", "monotone", "dense" or "opteq"; a class or
            function, which is called with those of in_features, width, generator and dtype that it
            takes, or its import path; or a module such as an `EquilibriumLayer`, of which a copy is
            trained. A cell f(z, x) becomes its equilibrium layer.
        width: Size of z; not used for a module.
        family_options: Further keywords of the family, e.g. `{"margin": 0.5}`.
        learning_rate, weight_decay: Of Adam.
        max_iter, batch_size: Most epochs, and samples a step.
        tol, n_iter_no_change: Training ends when the best loss has not fallen by `tol` for so many
            epochs.
        rtol: Tolerance of the equilibria in training, if the family has none; predictions are
            solved to 1e-12 in float64 and 1e-6 in float32.
        dtype: "float64" or "float32".
        certify: Whether `fit` looks for a certificate.
        random_state: Of the initialization and the order of the samples.

    Attributes:
        model_: The fitted network, on standardized targets.
        certificate_: What is proved: for theory networks `wp.certify` on the training data at the
            fitted parameters; for others existence and uniqueness of equilibria; None for a module
            without an `EquilibriumLayer`.
        certificate_reason_: What the certificate is about, or why there is none.
        n_iter_, loss_curve_: Epochs, and the mean loss of each.
        y_mean_, y_scale_: Of the targets.
    """

    def fit(self, X: Any, y: Any) -> EquilibriumRegressor:
        """Trains a new network on (n, d) inputs and (n,) targets."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._start(X, y)
        self._fit(self._tensor(X), self._target(y))
        return self

    def partial_fit(self, X: Any, y: Any) -> EquilibriumRegressor:
        """One epoch; the first call makes the network and fixes shift and scale of the targets."""
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
        return 0.5 * (output.reshape(-1) - target).square().sum()
