"""Data files that are damaged, or made to fill the memory: refused in one sentence, before the memory is filled."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

import wellposed.data.parquet as parquet_files
from wellposed.data import load
from wellposed.data.parquet import read_parquet
from wellposed.data.table import read_csv
from wellposed.errors import InvalidArgument
from wellposed_lab.runs.config import resolve
from wellposed_lab.runs.setup import prepare

X = np.arange(30.0).reshape(10, 3)
Y = np.arange(10.0)


def member(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def archive(path: Path, x: bytes, y: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("X.npy", x)
        file.writestr("y.npy", y)
    return path


def header(descr: str, shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    npy.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue()


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_unpack_without_a_bound_are_refused(tmp_path: Path, compression: int) -> None:
    # zipfile unpacks a whole block of these, whatever size the archive states
    path = archive(tmp_path / "a.npz", member(X), member(Y), compression)
    with pytest.raises(InvalidArgument, match="compress"):
        load(str(path))
    for good in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        assert len(load(str(archive(tmp_path / "a.npz", member(X), member(Y), good))).X) == 8


def test_text_beyond_unicode_is_refused(tmp_path: Path) -> None:
    for order in "<>":
        wrong = header(f"{order}U1", (10,)) + struct.pack(f"{order}I", 0x7FFFFFFF) * 10
        with pytest.raises(InvalidArgument, match="not Unicode text"):
            load(str(archive(tmp_path / "a.npz", member(X), wrong)), classify=True)
        right = header(f"{order}U1", (10,)) + struct.pack(f"{order}I", 0x10FFFF) * 5 + struct.pack(f"{order}I", 97) * 5
        assert load(str(archive(tmp_path / "a.npz", member(X), right)), classify=True).y.unique().tolist() == [0, 1]


def test_numbers_beyond_float64_are_refused_without_a_warning(tmp_path: Path) -> None:
    big = X.astype(np.longdouble) * np.longdouble("1e4000")
    if not np.isfinite(big).all():
        pytest.skip("long double is float64 here")
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{1.7e308 - i * 1e307},{i}\n" for i in range(9)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArgument, match="infinite"):
            load(str(archive(tmp_path / "a.npz", member(big), member(Y))))
        with pytest.raises(InvalidArgument, match="too large"):
            load(str(tmp_path / "a.csv"))


def test_a_table_with_many_columns_takes_linear_time(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(60_000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    began = time.process_time()
    assert list(read_csv(tmp_path / "a.csv").columns) == names
    assert time.process_time() - began < 10  # about 1; with a count for each name it took minutes
    (tmp_path / "b.csv").write_text("a,b,b,a\n1,2,3,4\n")
    with pytest.raises(InvalidArgument, match="'a' twice"):
        read_csv(tmp_path / "b.csv")


def test_a_table_is_refused_by_the_size_of_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # runs of equal values take a few bytes in the file, however long they are
    path = parquet(tmp_path / "a.parquet", {"a": np.zeros(200_000), "y": np.zeros(200_000)})
    assert path.stat().st_size < 100_000
    assert len(read_parquet(path)) == 200_000
    monkeypatch.setattr(parquet_files, "LARGEST", 2_000_000)
    with pytest.raises(InvalidArgument, match="200,000 rows and 2 columns"):
        read_parquet(path)


def test_text_that_repeats_is_kept_once(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"a": np.arange(4000.0), "y": ["x" * 20_000, "y"] * 2000})
    tracemalloc.start()
    try:
        data = load(str(path), classify=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(data.y.unique().tolist()) == [0, 1]
    assert peak < 10e6  # with a copy for each row there are 4e7 letters, of 4 bytes in an array


def test_columns_of_every_kind_keep_their_numbers(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from decimal import Decimal

    whole = [2**53 + 1, None, -(2**63)]
    columns = {
        "int": pyarrow.array(whole, pyarrow.int64()),
        "unsigned": pyarrow.array([2**64 - 1, 0, None], pyarrow.uint64()),
        "half": pyarrow.array(np.array([0.5, 1, 2], np.float16)),
        "truth": pyarrow.array([True, None, False]),
        "decimal": pyarrow.array([Decimal("0.1"), None, Decimal("-9007199254740993")], pyarrow.decimal128(30, 1)),
        "places": pyarrow.array([3, None, 4]).dictionary_encode(),
        "text": pyarrow.array(["é", None, ""]),
        "large": pyarrow.array(["u", "v", None], pyarrow.large_string()),
        "word": pyarrow.array(["u", None, "u"]).dictionary_encode(),
        "list": pyarrow.array([[1], [], None]),
        "a.b": pyarrow.array([1.0, 2.0, 3.0]),
    }
    found = read_parquet(parquet(tmp_path / "a.parquet", columns)).columns
    assert list(found) == list(columns)
    expected: dict[str, list[Any]] = {
        "int": [float(2**53 + 1), np.nan, float(-(2**63))],
        "unsigned": [float(2**64 - 1), 0.0, np.nan],
        "half": [0.5, 1.0, 2.0],
        "truth": [1.0, np.nan, 0.0],
        "decimal": [0.1, np.nan, float(-9007199254740993)],
        "places": [3.0, np.nan, 4.0],
        "a.b": [1.0, 2.0, 3.0],
    }
    for name, values in expected.items():
        assert found[name].dtype == np.float64
        np.testing.assert_array_equal(found[name], np.array(values), err_msg=name)
    assert [found[name].tolist() for name in ("text", "large", "word")] == [["é", "", ""], ["u", "v", ""], ["u", "", "u"]]
    assert all(cell.startswith("<list") for cell in found["list"])


def test_a_column_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    places = pyarrow.py_buffer(np.arange(11, dtype=np.int32).tobytes())
    bad = pyarrow.Array.from_buffers(pyarrow.utf8(), 10, [None, places, pyarrow.py_buffer(b"\xff" * 10)])
    path = parquet(tmp_path / "a.parquet", {"a": Y, "y": bad})
    with pytest.raises(InvalidArgument, match="'y'.*UTF-8"):
        read_parquet(path)


@pytest.mark.parametrize("name", ["a\0b.csv", "~nobody9/x.csv", "\ud800.csv", "folder/\ud800.npz"])
def test_a_name_that_no_file_can_have_is_one_sentence(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"data\.name=.*cannot be"):
        load(name)
    with pytest.raises(InvalidArgument, match=r"data\.name=.*cannot be|data\.name of .* unicode"):
        prepare(resolve({"data": {"name": name}}))


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (f"a,y\n1,{LONG}\n2,{LONG}\n", {"classify": True}),
        (f"a,y\n1,{LONG}\n2,z\n", {"classify": False}),
        (f"a,y\n1,{LONG}\n2,z\n", {"classes": (0, 7)}),
        (f"a,y\n{LONG},1\n2,2\n", {}),
        (f"{LONG},y\n,1\n2,2\n", {}),
        (f"{LONG},{LONG}\n1,1\n2,2\n", {}),
        (f"{LONG},b\n1,1\n2,2\n", {}),
        (f"{'1' * 5000},2\n1,1\n2,2\n", {}),
    ],
)
def test_long_cells_and_names_are_shortened_in_messages(table: str, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table)
    with pytest.raises(InvalidArgument) as caught:
        load(str(tmp_path / "a.csv"), **options)
    assert len(str(caught.value)) < 1000


def test_the_names_of_many_arrays_are_not_all_listed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{f"{'a' * 100}{i}": Y for i in range(1000)})
    with pytest.raises(InvalidArgument, match=r"must hold arrays X and y .*, \.\.\.\.") as caught:
        load(str(tmp_path / "a.npz"))
    assert len(str(caught.value)) < 2000
