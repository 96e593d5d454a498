"""The sources that a result rests on, as BibTeX."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from wellposed.errors import InvalidType

#: A key of references.bib in a text, as in [bai2019] or [ling2022, (7)].
CITED = re.compile(r"\[([a-z]+[12][0-9]{3}[a-z]?)(?:, [^\]]*)?\]")
RELEASED = "2026"  #: The year of this version; `tests/test_release.py` compares it with CHANGELOG.md.
ENTRY = re.compile(r"^@\w+\{([^,\s]+),\n.*?^\}", re.MULTILINE | re.DOTALL)


@functools.cache
def bibliography() -> dict[str, str]:
    """The entries of `references.bib` by their keys, in the order of the file."""
    text = importlib.resources.files("wellposed").joinpath("references.bib").read_text(encoding="utf-8")
    return {entry[1]: entry[0] for entry in ENTRY.finditer(text)}


def cite(*results: Any) -> str:
    """BibTeX of what results rest on, and of this library.

    Sources are those that a result names itself (the theorem of a certificate, the equations of its
    hypotheses) and those that the docstrings of its parts name: of a model these are all its
    modules, with their solvers, gradients and parametrizations; of a proof the family of the
    network.

    Args:
        results: Certificates, proofs, models, layers, solvers, gradients, or functions and classes
            of this library.

    Returns:
        Entries in the order of the bibliography, after the one of wellposed.

    Examples:
        >>> import wellposed as wp
        >>> print(wp.cite(wp.ImplicitGradient()).splitlines()[0])
        @misc{wellposed,
        >>> "@inproceedings{bai2019," in wp.cite(wp.ImplicitGradient())
        True
    """
    cited = {key for result in results for text in _texts(result) for key in CITED.findall(text)}
    known = bibliography()
    return "\n\n".join([_software(), *(known[key] for key in known if key in cited)]) + "\n"


def _software() -> str:
    fields = {
        "author": "{The wellposed authors}",
        "title": "{wellposed}: equilibrium networks in {PyTorch}",
        "year": RELEASED,
        "note": f"Python package, version {importlib.metadata.version('wellposed')}",
    }
    lines = (f"  {name:<6} = {{{value}}},\n" for name, value in fields.items())
    return f"@misc{{wellposed,\n{''.join(lines)}}}"


def _texts(result: Any) -> Iterator[str]:
    """The texts in which a result names its sources."""
    if isinstance(result, nn.Module):
        for module in result.modules():
            yield from _docstrings(module)
            for part in vars(module).values():
                yield from _docstrings(part)
    elif hasattr(result, "cited"):  # certificates and proofs know what they rest on
        yield result.cited
    elif _is_ours(result):
        yield from _docstrings(result)
    else:
        raise InvalidType(
            f"cite takes certificates, proofs, models and parts of wellposed; got {type(result).__name__}. "
            "Pass the object that a function of wellposed returned, or its model."
        )


def _is_ours(part: Any) -> bool:
    kind = part if isinstance(part, type) or callable(part) and hasattr(part, "__module__") else type(part)
    return str(getattr(kind, "__module__", "")).partition(".")[0] == "wellposed"


def _docstrings(part: Any) -> Iterator[str]:
    """Of an object's class and those above it, or of a class or function itself; ours only."""
    if isinstance(part, type) or not _is_ours(part):
        kinds: tuple[Any, ...] = part.__mro__ if isinstance(part, type) else ()
    else:
        kinds = (part,) if hasattr(part, "__name__") else type(part).__mro__
    for kind in kinds:
        if _is_ours(kind):
            yield kind.__doc__ or ""
