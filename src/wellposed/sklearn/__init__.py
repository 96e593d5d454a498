"""Equilibrium networks as scikit-learn estimators."""

from wellposed.errors import MissingPackage, how_to_install

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError:
    raise MissingPackage(f"The estimators need scikit-learn; install it with: {how_to_install('sklearn')}.") from None

from wellposed.sklearn.estimators import EquilibriumClassifier, EquilibriumRegressor

__all__ = ["EquilibriumClassifier", "EquilibriumRegressor"]
