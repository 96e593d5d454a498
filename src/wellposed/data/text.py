"""Text as numbers of tokens: characters or words, in windows with what comes next.

A text has a name, or is a .txt file of the user.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed._reading import read_text, sha256
from wellposed.data.own import own_path
from wellposed.data.table import check_file
from wellposed.errors import InvalidArgument

#: name -> the files of the parts to train and to test on, in the folder of that name
TEXTS = {"wikitext2": ("valid.txt", "test.txt")}
#: sha256 of files that are known to be whole.
CHECKSUMS = {
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8": "wikitext2/valid.txt",
    "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0": "wikitext2/test.txt",
}
#: The file of a text of the user ends with this.
SUFFIX = ".txt"
#: The part of a text of the user that is kept to test: its end, since windows of a text are not independent.
TESTED = 5
#: The largest size of a file.
BYTES = 1 << 28
#: Kinds of characters that have a number of their own.
CHARACTERS = 96
#: The token 0: all characters or words that are not among the most frequent ones.
RARE = "<rare>"


def paths_of(name: str) -> tuple[Path, ...] | None:
    """Where the files of a text are expected; None if WELLPOSED_DATA is not set."""
    folder = os.environ.get("WELLPOSED_DATA")
    return tuple(Path(folder) / name / file for file in TEXTS[name]) if folder else None


def read_tokens(name: str, words: int | None) -> tuple[list[Tensor], tuple[str, ...], list[str]]:
    """The numbers of the tokens of both parts, the token of every number, and what was done.

    Args:
        name: Of the text, or the path of a file.
        words: Size of the vocabulary of words; None for characters.
    """
    texts, origin = _named(name) if name in TEXTS else ([_own(name)], "")
    parts = [text.replace("\n", " <eos> ").split() if words else list(text) for text in texts]
    if name not in TEXTS:
        parts = [parts[0][: -(len(parts[0]) // TESTED) or None], parts[0][len(parts[0]) - len(parts[0]) // TESTED :]]
        origin = f"{Path(name).name}, of which the last fifth is to test"
    if not all(parts):
        raise InvalidArgument(f"A part of {name} has no tokens; {'fetch it again' if name in TEXTS else 'give a longer text'}.")
    kept = [token for token, _ in Counter(parts[0]).most_common(CHARACTERS if words is None else words - 1)]
    number = {token: i + 1 for i, token in enumerate(kept)}
    tokens = [torch.tensor([number.get(token, 0) for token in part]) for part in parts]
    rare = [f"{(part == 0).double().mean():.2%}" for part in tokens]
    kind = "characters" if words is None else "words, with <eos> at the ends of lines"
    steps = [
        f"read from {origin}, {len(tokens[0])} and {len(tokens[1])} {kind}",
        f"the {len(kept)} most frequent ones of the first part have numbers; all others are the token 0 "
        f"({rare[0]} and {rare[1]})",
    ]
    return tokens, (RARE, *kept), steps


def _named(name: str) -> tuple[list[str], str]:
    """Both parts of a text by its name, and where they are from."""
    paths = paths_of(name)
    texts, known = [], True
    for file, path in zip(TEXTS[name], paths or (None, None), strict=True):
        text = None if path is None else read_text(path, limit=BYTES, error=InvalidArgument)
        if path is None or text is None:
            where = "WELLPOSED_DATA is not set" if path is None else f"{path} does not exist"
            raise InvalidArgument(
                f"{name} is not available: {where}. Set WELLPOSED_DATA to a folder with {name}/{file} (WikiText-2, CC BY-SA)."
            )
        known &= CHECKSUMS.get(sha256(path, limit=BYTES, error=InvalidArgument) or "") == f"{name}/{file}"
        texts.append(text)
    return texts, f"{' and '.join(TEXTS[name])} ({'checksums known' if known else 'checksums unknown'})"


def _own(name: str) -> str:
    path = own_path(name)
    check_file(path)
    text = read_text(path, limit=BYTES, error=InvalidArgument)
    assert text is not None
    return text.replace("\ufeff", "").replace("\r\n", "\n")  # a byte-order mark and line ends of Windows


def windows(tokens: Tensor, length: int, n: int | None) -> tuple[Tensor, Tensor]:
    """(n, length) tokens in order, and for each the one after it; None for all whole windows."""
    count = (len(tokens) - 1) // length
    if n is not None and n > count or count == 0:
        raise InvalidArgument(
            f"{len(tokens)} tokens make {count} windows of length={length}; {n or 1} are wanted. Lower length, n or n_test."
        )
    used = (count if n is None else n) * length
    return tokens[:used].reshape(-1, length), tokens[1 : used + 1].reshape(-1, length)


def text_windows(
    name: str, n: int | None, n_test: int | None, words: int | None, length: int
) -> tuple[list[Tensor], list[Tensor], tuple[str, ...], list[str]]:
    """Inputs and targets of both parts, the vocabulary, and what was done."""
    check_positive_integer("load", "length", length)
    if words is not None:
        check_positive_integer("load", "words", words)
    tokens, vocabulary, steps = read_tokens(name, words)
    parts = [windows(part, length, number) for part, number in zip(tokens, (n, n_test), strict=True)]
    counts = " to train, ".join(str(len(X)) for X, _ in parts)
    steps.append(f"windows of {length} tokens in order, {counts} to test; the target is the next token at every position")
    return [X for X, _ in parts], [y for _, y in parts], vocabulary, steps
