"""Text by name: numbers of tokens, windows, what comes next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import wellposed as wp
from wellposed.errors import InvalidArgument


def write(folder: Path, train: str, test: str) -> None:
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "valid.txt").write_text(train, encoding="utf-8")
    (folder / "wikitext2" / "test.txt").write_text(test, encoding="utf-8")


def test_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "the cat saw the dog\nthe cat\n", "the dog saw a cat\n")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    data = wp.data.load("wikitext2", words=4, length=2)
    assert data.tokens == ("<rare>", "the", "cat", "<eos>")  # the most frequent ones; at equal counts the first
    assert data.X.tolist() == [[1, 2], [0, 1], [0, 3], [1, 2]]
    assert data.y.tolist() == [[2, 0], [1, 0], [3, 1], [2, 3]]
    assert data.X_test is not None and data.X_test.tolist() == [[1, 0], [0, 0]]
    assert "checksums unknown" in data.steps[0] and data.X.dtype == data.y.dtype == torch.int64


def test_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "aab\nä" * 3, "bäz")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    data = wp.data.load("wikitext2", n=2, n_test=1, length=2)
    assert [data.tokens[i] for i in data.X.flatten().tolist()] == list("aab\n")
    assert [data.tokens[i] for i in data.y.flatten().tolist()] == list("ab\nä")
    assert data.y_test is not None and [data.tokens[i] for i in data.y_test[0].tolist()] == ["ä", "<rare>"]


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    with pytest.raises(InvalidArgument, match=r"wikitext2 is not available: WELLPOSED_DATA is not set. .*wikitext2/valid.txt"):
        wp.data.load("wikitext2")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"valid.txt does not exist"):
        wp.data.load("wikitext2")
    write(tmp_path, "abcabc", "abc")
    with pytest.raises(InvalidArgument, match="3 tokens make 0 windows of length=4"):
        wp.data.load("wikitext2", length=4)
    with pytest.raises(InvalidArgument, match="6 tokens make 2 windows of length=2; 3 are wanted"):
        wp.data.load("wikitext2", n=3, length=2)
    with pytest.raises(InvalidArgument, match="takes n, n_test, words and length only"):
        wp.data.load("wikitext2", norm="unit")
    with pytest.raises(InvalidArgument, match="words is for texts"):
        wp.data.load("sphere", words=10)
    with pytest.raises(InvalidArgument, match="has no classes"):
        wp.data.load("wikitext2", classes=(0, 1))
    (tmp_path / "wikitext2" / "test.txt").write_text("")
    with pytest.raises(InvalidArgument, match="has no tokens"):
        wp.data.load("wikitext2", length=2)


@pytest.mark.skipif(
    not (Path(os.environ.get("WELLPOSED_DATA", "")) / "wikitext2" / "valid.txt").is_file(),
    reason="WELLPOSED_DATA has no wikitext2/valid.txt",
)
def test_the_real_text() -> None:
    data = wp.data.load("wikitext2", words=1000)
    assert "checksums known" in data.steps[0] and "217646 and 245569 words" in data.steps[0]
    assert data.X.shape == (4534, 48) and len(data.tokens) == 1000
    torch.testing.assert_close(data.X.flatten()[1:], data.y.flatten()[:-1], rtol=0, atol=0)


def test_a_text_of_your_own_is_parted_in_order(tmp_path: Path) -> None:
    path = tmp_path / "book.TXT"
    path.write_text("abc" * 6 + "xy", encoding="utf-8")
    data = wp.data.load(str(path), length=3)
    assert data.name == "book.TXT" and data.X.shape == (5, 3) and data.X_test is not None and data.X_test.shape == (1, 3)
    assert [data.tokens[i] for i in data.X.flatten().tolist()] == list("abc" * 5)  # 16 of 20 characters are to train
    assert [data.tokens[i] for i in data.y[0].tolist()] == list("bca")
    assert [data.tokens[i] for i in data.X_test[0].tolist()] == ["b", "c", "<rare>"]  # the last fifth; x is not in the first
    assert "the last fifth is to test" in data.steps[0] and "book.TXT" in data.steps[0]
    path.write_bytes(b"\xef\xbb\xbfto be or\r\nnot to be " * 4)  # as some editors of Windows write it
    words = wp.data.load(str(path), words=6, length=1)
    assert words.tokens == ("<rare>", "to", "be", "or", "<eos>", "not")
    assert "\r" not in wp.data.load(str(path), length=1).tokens


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (None, {}, r"book.txt' cannot be read: No such file"),
        (b"", {}, "book.txt is empty"),
        (b"ab", {}, "has no tokens; give a longer text"),
        (b"ab" * 40, {}, "16 tokens make 0 windows of length=48; 1 are wanted. Lower"),
        (b"\xff\xfe" * 100, {}, "byte 0 is not UTF-8 text"),
        (b"a b " * 100, {"norm": "unit"}, "is a text: it takes n, n_test, words and length only"),
        (b"a b " * 100, {"classes": (0, 1)}, "is a text: it takes n, n_test, words and length only"),
        (b"a b " * 100, {"target": "y"}, "is a text: it takes n, n_test, words and length only"),
        (b" \n " * 100, {"words": 3, "length": 500}, "windows of length=500"),
    ],
    ids=["missing", "empty", "short", "shorter than a window", "bytes", "norm", "classes", "target", "long"],
)
def test_a_text_of_your_own_that_cannot_be_loaded(content: bytes | None, options: dict, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(InvalidArgument, match=says):
        wp.data.load(str(tmp_path / "book.txt"), **options)
