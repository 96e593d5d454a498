"""EquilibriumClassifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.sklearn._estimator import AbstractEstimator

__all__ = ["EquilibriumClassifier"]


class EquilibriumClassifier(ClassifierMixin, AbstractEstimator):
    r"""An equilibrium network for classification: softmax(V z + v) with z = f(z, x), trained on cross-entropy.

        >>> import numpy as np, wellposed as wp
        >>> X = np.linspace(-1, 1, 20)[:, None]
        >>> model = wp.EquilibriumClassifier("dense", 16, random_state=0).fit(X, X[:, 0] ** 2 > 0.3)
        >>> model.predict_proba(X).shape
        (20, 2)

    Args:
        family: As in `EquilibriumRegressor`; of a theory network the equilibria are used, with a new read-out.
        width, family_options, learning_rate, max_iter, batch_size: As in `EquilibriumRegressor`.
        tol, n_iter_no_change, weight_decay, rtol, dtype, certify, random_state: As there.

    Attributes:
        classes_: (k,) the labels.
        model_: The fitted network, X -> logits.
        certificate_: Existence and uniqueness of equilibria, if they are proved for the family; else None. No theorem of the
            papers is about training with cross-entropy.
        certificate_reason_: What the certificate is about, or why there is none.
        n_iter_, loss_curve_: Epochs, and the mean loss of each.
    """

    def fit(self, X: Any, y: Any) -> EquilibriumClassifier:
        """Trains a new network.

        Args:
            X: (n, d). y: (n,) labels of any kind.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        self._begin(X.shape[1], len(self.classes_))
        self._fit(self._tensor(X), self._target(y))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> EquilibriumClassifier:
        """One epoch on these samples; the first call makes the network.

        Args:
            X: (n, d). y: (n,) labels.
            classes: (k,) all labels that will ever come; needed at the first call.
        """
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise InvalidArgument("The first call of partial_fit needs classes=, all labels that will ever come.")
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
        """(n, d) -> (n, k) logits; for two classes (n,) their difference, positive for `classes_[1]`."""
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
        return nn.functional.cross_entropy(output, target)
