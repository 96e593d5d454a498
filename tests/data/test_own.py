"""Files of the user: what is read is what is in them, and every mistake is one sentence."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wellposed as wp
from wellposed.data import load

ROWS = [(float(i), float(i * i % 7), 3.0 * i + 1, "ab"[i % 2]) for i in range(20)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = ["size,rooms,price,town", *(f"{a},{b},{c},{d}" for a, b, c, d in ROWS)]
    (tmp_path / "houses.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "houses.csv"


def parquet(path: Path, **columns: Any) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.table(columns), path)
    return path


def pairs(data: wp.data.Dataset) -> set[tuple[float, ...]]:
    """Every sample with its target, of both parts."""
    assert data.X_test is not None and data.y_test is not None
    X, y = torch.cat([data.X, data.X_test]), torch.cat([data.y, data.y_test])
    return {(*x, t) for x, t in zip(X.tolist(), y.tolist(), strict=True)}


def test_a_table_is_read_row_by_row(table: Path) -> None:
    options: dict[str, Any] = {"target": "price", "columns": ("rooms", "size"), "standardize": False, "dtype": torch.float64}
    data = load(str(table), **options)
    assert pairs(data) == {(b, a, c) for a, b, c, _ in ROWS}
    assert len(data.X) == 16 and data.X_test is not None and len(data.X_test) == 4 and data.name == "houses.csv"
    assert torch.equal(load(str(table), **options).X, data.X) and not torch.equal(load(str(table), seed=1, **options).X, data.X)
    some = load(str(table), n=5, n_test=3, **options)
    assert len(some.X) == 5 and some.X_test is not None and len(some.X_test) == 3
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(("size", "rooms", "price", "town"))}
    same = load(str(parquet(table.with_suffix(".parquet"), **columns)), **options)
    assert torch.equal(same.X, data.X) and torch.equal(same.y, data.y)
    text = table.read_text()
    for mark in (";", "\t"):
        table.write_text("\ufeff" + text.replace(",", mark))
        assert torch.equal(load(str(table), **options).X, data.X)


def test_standardized_by_the_training_samples_alone(table: Path) -> None:
    data = load(str(table), target="price", columns=("size",), dtype=torch.float64)
    raw = load(str(table), target="price", columns=("size",), dtype=torch.float64, standardize=False)
    mean, size = raw.X.mean(), raw.X.std(correction=0)
    torch.testing.assert_close(data.X, (raw.X - mean) / size, rtol=1e-14, atol=1e-14)
    assert data.X_test is not None and raw.X_test is not None and data.y_test is not None and raw.y_test is not None
    torch.testing.assert_close(data.X_test, (raw.X_test - mean) / size, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(data.y_test, (raw.y_test - raw.y.mean()) / raw.y.std(correction=0), rtol=1e-14, atol=1e-14)
    assert "a prediction p stands for" in str(data)


def test_classes_of_text_and_of_integers(table: Path) -> None:
    data = load(str(table), target="town", columns=("size",), standardize=False)
    assert data.y.dtype == torch.int64 and pairs(data) == {(a, "ab".index(d)) for a, _, _, d in ROWS}
    signs = load(str(table), classes=(1, 0), target="town", columns=("size",), standardize=False)
    assert pairs(signs) == {(a, 1.0 if d == "a" else -1.0) for a, _, _, d in ROWS}
    whole = load(str(table), target="rooms", columns=("size",), classify=True, standardize=False)
    levels = sorted({b for _, b, _, _ in ROWS})
    assert pairs(whole) == {(a, levels.index(b)) for a, b, _, _ in ROWS}
    three = load(str(table), classes=(2, 0, 1), target="rooms", columns=("size",), standardize=False)
    assert pairs(three) == {(a, [2, 0, 1].index(levels.index(b))) for a, b, _, _ in ROWS if levels.index(b) < 3}


def test_a_few_integers_learned_as_numbers_are_named(table: Path) -> None:
    path = table.with_name("classes.csv")
    path.write_text("x,y\n" + "".join(f"{i},{i % 3}\n" for i in range(12)))
    with pytest.warns(wp.WellposedWarning, match=r"has 3 different integers.*model\.name=dense"):
        load(str(path), target="y", classify=False)


def test_arrays(tmp_path: Path) -> None:
    X, y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
    np.savez(tmp_path / "a.npz", X=X, y=y)
    data = load(str(tmp_path / "a.npz"), dtype=torch.float64)
    assert pairs(data) == {(*x, t) for x, t in zip(X.tolist(), y.tolist(), strict=True)} and len(data.X) == 5
    np.savez(tmp_path / "b.npz", x_train=X, y_train=y.astype(int), x_test=X[:2] + 100, y_test=y[:2].astype(int))
    data = load(str(tmp_path / "b.npz"), dtype=torch.float64)
    assert data.X_test is not None and len(data.X) == 6 and sorted(data.X_test[:, 0].tolist()) == [100.0, 102.0]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "is empty"),
        ("a,y\n", {}, "names of columns and no rows"),
        ("1,2\n3,4\n", {}, "must hold the names of the columns; it holds numbers"),
        ("a,a,y\n1,2,3\n", {}, "has the column 'a' twice"),
        ("a,,y\n1,2,3\n", {}, "Column 2 of .* has no name"),
        ("a,y\n1,2\n1,2,3\n", {}, "line 3: 3 cells where the first row has 2 names"),
        ("a,b\n1,2\n", {}, "data.target must name the column of t.csv to learn; it has a, b"),
        ("a,price\n1,2\n", {"target": "prise"}, "no such column; it has a, price. Did you mean 'price'"),
        ("a,y\n1,2\n", {"columns": ("aa",)}, "data.columns='aa': t.csv has no such column"),
        ("a,y\n1,2\n", {"columns": ("a", "y")}, "without the target 'y'; got a, y"),
        ("a,y\n1,2\n", {"columns": ("a", "a")}, "must be different columns"),
        ("y\n1\n2\n", {}, "no column beside the target 'y'"),
        ("a,y\n1,2\nx,3\n", {}, "Column 'a' of t.csv holds text .'x' in row 2"),
        ('a,y\n"1,5",2\n"0,1",3\n', {}, "replace the decimal commas"),
        ("a,y\n1,2\n,3\n", {}, "Row 2 of column 'a' of t.csv is empty or NaN .1 of 2 cells"),
        ("a,y\n1,2\n2,inf\n", {}, "Row 2 of column 'y' of t.csv is inf"),
        ("a,y\n1,2\n", {}, "has 1 usable row; at least 2 are needed"),
        ("a,y\n1,2\n2,3\n3,4\n", {"n": 3}, "3 usable rows: too few for data.n=3 to train and 1 to test"),
        ("a,y\n1,u\n2,v\n", {"classify": False}, "is text .'u'., so it is a class: choose model.name=dense"),
        ("a,y\n1,0.5\n2,1\n", {"classify": True}, "has 0.5. Choose model.name=gaussian"),
        ("a,y\n1,u\n2,u\n", {}, "one class only .u"),
        ("a,y\n1,u\n2,\n", {}, "Row 2 of the target 'y' of t.csv is empty"),
        ("a,y\n1,u\n2,v\n", {"classes": (0, 2)}, "from 0 to 1, the places of the sorted classes .u, v.; got"),
        ("a,y\n1,2\n", {"grey": True}, "are for images of the built-in data sets"),
        ('a,y\n"1,2\n', {}, "is not a .csv file: unexpected end"),
        ("a,y\n1e300,2\n2,3\n3,5\n", {"standardize": False}, "too large for torch.float32"),
    ],
)
def test_mistakes_in_a_table_are_one_sentence(text: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(wp.InvalidArgument, match=says) as error:
        load(str(tmp_path / "t.csv"), **options)
    assert str(error.value).count("\n") == 0


def test_files_that_are_none(tmp_path: Path, table: Path) -> None:
    for name, says in {
        "house.csv": "cannot be read: No such file or directory. Did you mean 'houses.csv'",
        "houses.xlsx": r"files are read if they end with \.csv, \.parquet, \.npz",
        "folder.csv": "is not a file",
        "pipe.csv": "is not a file",
    }.items():
        if name == "folder.csv":
            (tmp_path / name).mkdir()
        if name == "pipe.csv":
            os.mkfifo(tmp_path / name)
        with pytest.raises(wp.InvalidArgument, match=says):
            load(str(tmp_path / name))
    (tmp_path / "bytes.csv").write_bytes(b"a,y\n\xff,1\n")
    with pytest.raises(wp.InvalidArgument, match="byte 4 is not UTF-8"):
        load(str(tmp_path / "bytes.csv"))
    for name in ("bytes.parquet", "bytes.npz"):
        (tmp_path / name).write_bytes(b"PK nonsense")
        with pytest.raises(wp.InvalidArgument, match="cannot be read as a"):
            load(str(tmp_path / name))
    with pytest.raises(wp.InvalidArgument, match=r"are for files .*; digits has none"):
        load("digits", target="y")
    with pytest.raises(wp.InvalidArgument, match="Unknown data set 'digit'.*Did you mean 'digits'"):
        load("digit")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": np.ones(3)}, "must hold arrays X and y .*; it holds a"),
        ({"X": np.ones(3), "y": np.ones(3)}, r"X of a.npz must be numbers of shape .* got float64 of shape \(3,\)"),
        ({"X": np.ones((0, 2)), "y": np.ones(0)}, "X of a.npz must be numbers of shape"),
        ({"X": np.ones((3, 2)), "y": np.ones(4)}, r"y of a.npz must be numbers or text of shape \(3,\)"),
        ({"X": np.array([[1.0], [np.nan]]), "y": np.ones(2)}, r"X of a.npz is NaN or infinite in 1 samples \(first: index 1\)"),
        (
            {"X": np.array([[1, None]], dtype=object), "y": np.ones(1)},
            "cannot be read as a NumPy archive .*Python objects, which are never loaded",
        ),
        ({"X": np.ones((3, 2)), "y": np.ones(3), "X_test": np.ones((1, 3)), "y_test": np.ones(1)}, r"shapes \(2,\) and \(3,\)"),
    ],
)
def test_mistakes_in_an_archive_are_one_sentence(arrays: dict[str, np.ndarray], says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(wp.InvalidArgument, match=says):
        load(str(tmp_path / "a.npz"))


def test_what_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellposed.data.own.LARGEST", 1000)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", bytes(2000))
        archive.writestr("y.npy", b"")
    with pytest.raises(wp.InvalidArgument, match="its arrays take 2,000 bytes; at most 1,000 are read"):
        load(str(tmp_path / "a.npz"))


def test_parquet_columns(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", a=[1, 2, None], b=[True, False, True], c=[[1], [2], [3]], y=[0.5, 1.5, 2.5])
    data = load(str(path), columns=("b",), standardize=False)
    assert pairs(data) == {(1.0, 0.5), (0.0, 1.5), (1.0, 2.5)}
    with pytest.raises(wp.InvalidArgument, match="Row 3 of column 'a' of p.parquet is empty"):
        load(str(path), columns=("a", "b"))
    with pytest.raises(wp.InvalidArgument, match="Column 'c' of p.parquet holds text .'<list"):
        load(str(path), columns=("c",))
    with pytest.raises(wp.InvalidArgument, match="has columns and no rows"):
        load(str(parquet(tmp_path / "q.parquet", a=[], y=[])))
