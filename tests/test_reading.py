"""Files of unknown origin: what is not a regular file of a sensible size is refused at once, with one sentence."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from wellposed._reading import files_in, parse_json, read_arrays, read_bytes, read_object, read_text
from wellposed.errors import InvalidArgument, RunError


def refused(path: Path, within: Path | None = None, limit: int = 100) -> str:
    with pytest.raises(RunError) as caught:
        read_bytes(path, limit=limit, error=RunError, within=within)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert "a named pipe" in refused(tmp_path / "pipe")
    assert "a device" in refused(tmp_path / "endless")
    assert "a folder" in refused(tmp_path)
    assert read_bytes(tmp_path / "nothing", limit=1, error=RunError) is None


def test_links_are_followed_outside_a_run_only(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "private").write_text("secret")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "private")
    (tmp_path / "run" / "folder").symlink_to(tmp_path)
    assert read_text(tmp_path / "run" / "link", limit=100, error=RunError) == "secret"
    assert "is a link" in refused(tmp_path / "run" / "link", within=tmp_path / "run")
    with pytest.raises(RunError, match="folder is a link"):
        read_bytes(tmp_path / "run" / "folder" / "private", limit=100, error=RunError, within=tmp_path / "run")
    with pytest.raises(RunError, match="folder is a link"):
        files_in(tmp_path / "run" / "folder", "p", "", error=RunError, within=tmp_path / "run")
    (tmp_path / "other").symlink_to(tmp_path / "run")  # the run itself may be reached by a link
    assert files_in(tmp_path / "other", "l", "k", error=RunError, within=tmp_path / "other") == [tmp_path / "other" / "link"]


def test_sizes_text_and_depth(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 101)
    assert "101 bytes; a file of this kind has at most 100" in refused(path)
    path.write_bytes(b"a\xff")
    with pytest.raises(RunError, match="byte 1 is not UTF-8"):
        read_text(path, limit=100, error=RunError)
    path.write_text("[1]")
    with pytest.raises(RunError, match="must hold a JSON object; it holds a list"):
        read_object(path, limit=100, error=RunError)
    for text in ("[" * 100_000, "[" * 65 + "]" * 65):
        with pytest.raises(RunError, match="nested more than 64 levels"):
            parse_json(text, "it", error=RunError)
    assert parse_json("[" * 64 + "]" * 64, "it", error=RunError)
    with pytest.raises(RunError, match="it is not JSON"):
        parse_json("9" * 5000, "it", error=RunError)


def arrays(path: Path, limit: int = 1 << 20) -> dict[str, np.ndarray]:
    found = read_arrays(path, limit=limit, error=InvalidArgument, says="{path}: {reason}")
    assert found is not None
    return found


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    saved = {"a": np.arange(6.0).reshape(2, 3), "b": np.asfortranarray(np.arange(6).reshape(2, 3)), "c": np.array("text")}
    saved |= {"d": np.zeros((0, 4), np.float32), "e": np.array([True, False])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **saved)
        found = arrays(tmp_path / "a.npz")
        assert list(found) == list(saved)
        for name, array in saved.items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array) and found[name].flags.writeable


def member(path: Path, header: str, content: bytes = b"") -> Path:
    """An archive with one array, whose header is written by hand."""
    text = header.encode() + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content)
    return path


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}", "states 8,000,000,000,000 bytes"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "holds Python objects"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (", "Cannot parse header|cannot parse|EOF"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", "states -8 bytes"),
    ],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(header: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=says):
        arrays(member(tmp_path / "a.npz", header, b"\x00" * 8))


def test_bombs_encryption_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(1 << 18))
    assert path.stat().st_size < 10_000
    with pytest.raises(InvalidArgument, match="arrays take 2,097,280 bytes; at most 1,048,576"):
        arrays(path)
    assert arrays(path, 1 << 22)["a"].shape == (1 << 18,)
    np.savez_compressed(path, a=np.random.default_rng(0).integers(0, 9, 1000))
    content = path.read_bytes()
    secret = bytearray(content)
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        secret[content.index(signature) + place] |= 1
    path.write_bytes(secret)
    with pytest.raises(InvalidArgument, match="is encrypted"):
        arrays(path)
    place = content.index(b"a.npy") + 200  # in the compressed numbers
    path.write_bytes(content[:place] + bytes(b ^ 0xFF for b in content[place : place + 40]) + content[place + 40 :])
    with pytest.raises(InvalidArgument, match="decompressing|CRC|truncated"):
        arrays(path)
    end = content.rindex(b"PK\5\6")
    path.write_bytes(content[: end + 12] + (1 << 30).to_bytes(4, "little") + content[end + 16 :])
    with pytest.raises(InvalidArgument, match="list of members is too long"):
        arrays(path)
