"""The theorems of the papers, one file a paper: hypotheses, constants, and what they license.

A new theorem is a file here and a line in this table. A family names its theorem by the key
(`Theory.theorem`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from wellposed.certify.certificate import Certificate
from wellposed.certify.theorems import gao2022, gao2023, ling2022, nguyen2022

__all__ = ["PAPERS", "TRIED"]

#: (model, X, y, **options) -> Certificate, by key.
PAPERS: dict[str, Callable[..., Certificate]] = {
    "ling2022": ling2022.ling2022,
    "nguyen2022": nguyen2022.nguyen2022,
    "gao2022": gao2022.gao2022,
    "gao2023": gao2023.gao2023,
}
#: With which options `theorem="auto"` tries a theorem, in this order, if not once without any.
TRIED: dict[str, tuple[Mapping[str, Any], ...]] = {"nguyen2022": ({"dynamics": "descent"}, {"dynamics": "flow"})}
