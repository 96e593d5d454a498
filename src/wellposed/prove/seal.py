"""A checksum of all that a stored proof says, so that a change of any number in it is seen."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def seal(document: dict[str, Any]) -> str:
    """SHA-256 of the JSON document without its own "seal", keys sorted and no spaces.

    A damaged file does not have this number. A forger can compute it anew: what then speaks against
    him are the inequalities, and the steps that are computed again.
    """
    text = json.dumps({k: v for k, v in document.items() if k != "seal"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def tensor_hash(values: np.ndarray) -> str:
    """SHA-256 of the bytes of a float tensor, little endian, row by row."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()
