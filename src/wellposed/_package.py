"""Packages that are called like the function of their name: `certify` and `prove`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


class CallablePackage(ModuleType):
    """A package that pickles by name and lists its public names; a subclass has `__call__`."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        """The public names, without what the package imports."""
        return list(self.__all__)
