"""Equilibrium networks as scikit-learn estimators."""

from wellposed.errors import MissingPackage

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError:
    raise MissingPackage("The estimators need scikit-learn; install it with: pip install 'wellposed[sklearn]'.") from None

from wellposed.sklearn.classifier import EquilibriumClassifier
from wellposed.sklearn.regressor import EquilibriumRegressor

__all__ = ["EquilibriumClassifier", "EquilibriumRegressor"]
