"""States as structures, and as rows of one matrix."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils import _pytree as pytree

import wellposed as wp
from wellposed._tree import Layout, describe, leaves, map_leaves, rebuild
from wellposed.errors import InvalidArgument, InvalidType


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Fields:
    """A class registered by its user, as Hugging Face does with the outputs of its models."""

    low: Any
    high: Any

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter((self.low, self.high))


pytree.register_pytree_node(Fields, lambda fields: ([fields.low, fields.high], None), lambda parts, _: Fields(*parts))


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)


STATES = {
    "tensor": numbered(2, 3),
    "vector": numbered(2),
    "image": numbered(2, 3, 4, 4),
    "tuple": (numbered(2, 3), numbered(2, 1, 2)),
    "list": [numbered(2), numbered(2, 3)],
    "one": (numbered(2, 3),),
    "dict": {"b": numbered(2, 3), "a": numbered(2)},
    "nested": {"x": (numbered(2, 2), [numbered(2)]), "y": numbered(2, 1, 1, 2)},
    "ordered": OrderedDict(b=numbered(2, 3), a=numbered(2)),
    "registered": Fields(numbered(2, 3), {"x": numbered(2, 1)}),
    "named": Pair(numbered(2, 3), numbered(2, 2)),
    "no features": numbered(2, 0),
    "some without features": (numbered(2, 3), numbered(2, 0, 4), numbered(2)),
    "empty batch": (numbered(0, 3), numbered(0, 2, 2)),
}
every_state = pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


@every_state
def test_there_and_back(state: Any) -> None:
    layout = Layout.of(state, "z0")
    rows = layout.flatten(state)
    batch = leaves(state)[0].shape[0]
    assert rows.shape == (batch, sum(layout.sizes)) and layout.batch == batch
    assert same(layout.unflatten(rows), state)


@every_state
def test_some_rows_are_the_rows_of_some_samples(state: Any) -> None:
    layout = Layout.of(state, "z0")
    if layout.batch == 2:
        part = layout.unflatten(layout.flatten(state)[[1, 0, 1]])
        assert same(part, map_leaves(lambda leaf: leaf[[1, 0, 1]], state))


def test_columns_are_in_the_order_of_the_leaves() -> None:
    state = {"b": torch.tensor([[1.0, 2.0]]), "a": (torch.tensor([3.0]), torch.tensor([[[4.0]]]))}
    assert Layout.of(state, "z0").flatten(state).tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_a_single_contiguous_tensor_is_not_copied() -> None:
    z = numbered(2, 3, 4)
    assert Layout.of(z, "z0").flatten(z).data_ptr() == z.data_ptr()


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.lists(st.integers(0, 3), max_size=3).map(tuple).map(lambda shape: numbered(3, *shape)),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("pqrs"), inner, min_size=1, max_size=3),
        ),
        max_leaves=6,
    )
)
def test_any_structure_there_and_back(state: Any) -> None:
    layout = Layout.of(state, "z0")
    assert same(layout.unflatten(layout.flatten(state)), state)
    assert layout.check(state, 3) is None


def test_leaves_and_rebuild() -> None:
    tree = {"x": (1, [2, 3]), "y": 4}
    assert leaves(tree) == [1, 2, 3, 4]
    assert rebuild(tree, [5, 6, 7, 8]) == {"x": (5, [6, 7]), "y": 8}
    assert map_leaves(lambda leaf: -leaf, Pair(1, (2,))) == Pair(-1, (-2,))
    assert isinstance(map_leaves(lambda leaf: leaf, Pair(1, 2)), Pair)


def test_describe() -> None:
    assert describe({"x": (numbered(2, 3), [numbered(2)]), "y": 1.0}) == "{'x': tuple((2, 3), list((2,))), 'y': float}"


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_low_precision_is_computed_in_float32(dtype: torch.dtype, compute: torch.dtype) -> None:
    layout = Layout.of(torch.zeros(2, 3, dtype=dtype), "z0")
    assert layout.dtype == dtype and layout.compute_dtype == compute


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([numbered(2, 3), None], InvalidType, r"z0 must be a tensor, or a tuple.*found a NoneType"),
        (1.0, InvalidType, "found a float"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            InvalidType,
            r"floating point, real or complex; got torch\.int64.*torch\.float32",
        ),
        (torch.tensor(1.0), InvalidArgument, r"batch first.*no dimension.*\(1, features\)"),
        ((), InvalidArgument, "holds no tensor"),
        ({}, InvalidArgument, "holds no tensor"),
        ((numbered(2, 3), numbered(3, 3)), InvalidArgument, r"share batch size.*got 2, .* and 3, "),
        ((numbered(2, 3), numbered(2, 3).float()), InvalidArgument, r"torch\.float64.*torch\.float32"),
    ],
)
def test_states_that_cannot_work(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Layout.of(state, "z0")


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ((numbered(2, 3), numbered(2, 2)), r"expected tuple\(\(2, 3\), \(2, 1, 2\)\), got tuple\(\(2, 3\), \(2, 2\)\)"),
        ((numbered(3, 3), numbered(3, 1, 2)), r"got tuple\(\(3, 3\), \(3, 1, 2\)\)"),
        ([numbered(2, 3), numbered(2, 1, 2)], r"got list"),
        ((numbered(2, 3),), r"got tuple\(\(2, 3\)\)"),
        (numbered(2, 5), r"got \(2, 5\)"),
        ({"a": numbered(2, 3), "b": numbered(2, 1, 2)}, r"got \{'a'"),
        ((numbered(2, 3), 1.0), r"float"),
    ],
)
def test_check_tells_what_was_expected(value: Any, seen: str) -> None:
    layout = Layout.of((numbered(2, 3), numbered(2, 1, 2)), "z0")
    problem = layout.check(value, 2)
    assert problem is not None
    with pytest.raises(ValueError, match=seen):
        raise ValueError(problem)


def test_check_of_a_part_of_the_batch() -> None:
    layout = Layout.of({"a": numbered(5, 3)}, "z0")
    assert layout.check({"a": numbered(2, 3)}, 2) is None
    assert layout.check({"a": numbered(5, 3)}, 2) is not None
    assert layout.check(OrderedDict(a=numbered(2, 3)), 2) is None


@pytest.mark.parametrize(
    "kind", [Fields, Pair, lambda low, high: OrderedDict(low=low, high=high)], ids=["registered", "named", "ordered"]
)
def test_any_registered_structure_can_be_a_state(kind: Any) -> None:
    """Solved, differentiated and returned in the structure in which the user wrote it."""
    x = numbered(3, 4) / 12

    def cell(z: Any, x: Tensor) -> Any:
        low, high = leaves(z)
        return kind(torch.tanh(0.3 * low + 0.1 * high.sum(dim=1, keepdim=True) + x), 0.5 * high + 0.1 * low[:, :2])

    start = kind(torch.zeros(3, 4, dtype=x.dtype), torch.zeros(3, 2, dtype=x.dtype))
    solution = wp.fixed_point(cell, start, args=(x,), rtol=1e-12, on_failure="raise")
    assert type(solution.value) is type(start)
    for value, image in zip(leaves(solution.value), leaves(cell(solution.value, x)), strict=True):
        torch.testing.assert_close(value, image, rtol=0.0, atol=2e-12 * float(torch.cat(leaves(solution.value), dim=1).norm()))
    x.requires_grad_()
    z = wp.EquilibriumLayer(cell, on_failure="raise")(x, start)
    assert type(z) is type(start)
    (gradient,) = torch.autograd.grad(sum(leaf.sum() for leaf in leaves(z)), x)
    unrolled = start
    for _ in range(80):
        unrolled = cell(unrolled, x)
    (expected,) = torch.autograd.grad(sum(leaf.sum() for leaf in leaves(unrolled)), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_another_registered_class_is_refused() -> None:
    layout = Layout.of(Fields(numbered(2, 3), numbered(2)), "z0")
    assert layout.check(Fields(numbered(2, 3), numbered(2)), 2) is None
    assert layout.check((numbered(2, 3), numbered(2)), 2) == "expected Fields((2, 3), (2,)), got tuple((2, 3), (2,))"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))], ids=["copy", "pickle"])
def test_a_layout_is_copied_and_stored_without_a_warning_of_torch(copied: Callable[[Layout], Layout]) -> None:
    """So that `copy.deepcopy(layer)` and `torch.save(layer)` give none after a forward pass."""
    for state in (torch.zeros(3, 2), (torch.zeros(3, 2), {"b": torch.zeros(3, 1, 4), "a": torch.zeros(3)})):
        layout = Layout.of(state, "z0")
        assert copied(layout) == layout
