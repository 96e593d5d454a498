"""Functions as maps of rows: what is taken, what stands still, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian, problem
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve import AbstractMap
from wellposed.solve._whole_batch import WholeBatch
from wellposed.solve.map import FunctionMap, RowsCoupled

DOUBLE = torch.float64


class Calls:
    """A function that keeps the sizes of the batches it saw."""

    def __init__(self, f) -> None:
        self.f, self.sizes = f, []

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        self.sizes.append(len(z))
        return self.f(z, *args)


def make(f, z: Tensor, *args: Tensor) -> tuple[FunctionMap, Calls]:
    calls = Calls(f)
    return FunctionMap(calls, Layout.of(z, "z0"), args), calls


def test_rows_of_a_row_wise_function_are_taken() -> None:
    z, x = gaussian(5, 3, seed=1), gaussian(5, 3, seed=2)
    f, calls = make(lambda z, x: torch.tanh(z) * x, z, x)
    whole = f(z)
    part = f.take(torch.tensor([3, 1]))
    assert torch.equal(part(z[[3, 1]]), whole[[3, 1]])
    smaller = part.take(torch.tensor([1]))
    assert torch.equal(smaller(z[[1]]), whole[[1]])
    assert calls.sizes == [5, 2, 1]


def test_rows_of_a_function_with_captured_data_stand_still() -> None:
    z, x = gaussian(5, 3, seed=1), gaussian(5, 3, seed=2)
    f, calls = make(lambda z: torch.tanh(z) * x, z)
    whole = f(z)
    part = f.take(torch.tensor([3, 1]))
    assert torch.equal(part(z[[3, 1]]), whole[[3, 1]])
    smaller = part.take(torch.tensor([1]))
    assert torch.equal(smaller(z[[1]]), whole[[1]])
    assert calls.sizes == [5, 2, 5, 5]
    assert torch.allclose(smaller.jacobian(z[[1]]).dense()[0], torch.diag((1 - torch.tanh(z[1]) ** 2) * x[1]))


def test_rows_that_stand_still_and_change_are_coupled() -> None:
    """Not row-wise at all, and refused for some of the rows: f of those that stand still shows it."""
    z, A = gaussian(5, 3, seed=1), gaussian(5, 5, seed=2)
    f, calls = make(lambda z: A @ z, z)
    f(z)
    part = f.take(torch.tensor([0, 1]))
    assert torch.equal(part(z[[0, 1]]), (A @ z)[[0, 1]])  # nothing has moved
    with pytest.raises(RowsCoupled):
        part(2 * z[[0, 1]])
    assert calls.sizes == [5, 2, 5, 5]


def test_a_batch_as_one_row() -> None:
    z, A = gaussian(5, 3, seed=1), gaussian(5, 5, seed=2)
    whole = WholeBatch(make(lambda z: A @ z, z)[0], z.shape)
    row = z.reshape(1, -1)
    assert torch.equal(whole(row), (A @ z).reshape(1, -1)) and whole.take(torch.tensor([0])) is whole
    J = whole.jacobian(row)
    dense = torch.kron(A, torch.eye(3, dtype=DOUBLE))
    assert torch.allclose(J.dense()[0], dense, rtol=1e-14) and torch.allclose(J.mv(row), row @ dense.T, rtol=1e-13)


def test_all_rows_are_the_map_itself_and_prove_nothing() -> None:
    z, x = gaussian(4, 3, seed=1), gaussian(4, 3, seed=2)
    f, calls = make(lambda z: 0.5 * z + x, z)
    whole = f(z)
    assert f.take(torch.arange(4)) is f and calls.sizes == [4]
    assert torch.equal(f.take(torch.tensor([2]))(z[[2]]), whole[[2]])


def test_standing_rows_that_are_not_finite_do_no_harm() -> None:
    z, x = gaussian(3, 2, seed=1), gaussian(3, 2, seed=2)
    z[0, 0] = torch.nan
    seen: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        seen.append(z)
        return 0.5 * z + x

    whole, _ = make(f, z)
    whole(z)
    part = whole.take(torch.tensor([2]))
    assert torch.equal(part(z[[2]]), 0.5 * z[[2]] + x[[2]])
    assert seen[-1].isfinite().all()


def test_what_f_raises_about_some_rows_is_no_error() -> None:
    def f(z: Tensor) -> Tensor:
        if len(z) != 4:
            raise AssertionError("only four")
        return 0.5 * z

    z = gaussian(4, 2, seed=1)
    whole, _ = make(f, z)
    whole(z)
    assert torch.equal(whole.take(torch.tensor([1]))(z[[1]]), 0.5 * z[[1]])


def test_structured_arguments_follow_their_samples() -> None:
    z = gaussian(4, 2, seed=1)
    data = {"scale": gaussian(4, 1, seed=2), "shared": gaussian(2, seed=3), "name": "kept", "number": 3}

    def f(z: Tensor, data: dict) -> Tensor:
        assert data["name"] == "kept"
        return z * data["scale"] + data["shared"] * data["number"]

    whole = FunctionMap(f, Layout.of(z, "z0"), (data,))
    value = whole(z)
    assert torch.equal(whole.take(torch.tensor([2, 0]))(z[[2, 0]]), value[[2, 0]])


def test_inputs_can_be_exchanged() -> None:
    z, x, y = gaussian(2, 2, seed=1), gaussian(2, 2, seed=2), gaussian(2, 2, seed=3)
    f, _ = make(lambda z, x: z * x, z, x)
    assert f.inputs()[0] is x
    assert torch.equal(f.with_inputs(y)(z), z * y) and torch.equal(f(z), z * x)


def test_forget_lets_go_of_states() -> None:
    z = gaussian(3, 2, seed=1)
    f, _ = make(lambda z: 0.5 * z, z)
    f(z)
    f.forget()
    assert f._seen is None
    f(z)
    assert torch.equal(f.take(torch.tensor([1]))(z[[1]]), 0.5 * z[[1]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_arguments_are_lifted(dtype: torch.dtype) -> None:
    z, x = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 0.1, dtype=dtype)
    seen: list[torch.dtype] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        seen.extend((z.dtype, x.dtype))
        return z + x

    value = FunctionMap(f, Layout.of(z, "z0"), (x,))(z.float())
    assert seen == [torch.float32] * 2
    assert value.dtype == torch.float32 and torch.equal(value, z.float() + x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_low_precision_weights_get_their_own_dtype(dtype: torch.dtype) -> None:
    z, W = torch.ones(2, 2, dtype=dtype), torch.eye(2, dtype=dtype) / 2
    f = FunctionMap(lambda z: z @ W, Layout.of(z, "z0"))
    for _ in range(2):
        value = f(z.float())
        assert value.dtype == torch.float32 and torch.equal(value, torch.full((2, 2), 0.5))
    assert f.take(torch.tensor([1]))(z[[1]].float()).dtype == torch.float32


def test_errors_of_low_precision_functions_are_their_own() -> None:
    def f(z: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        FunctionMap(f, Layout.of(torch.ones(1, 1).half(), "z0"))(torch.ones(1, 1))


def test_dtype_and_shape_are_checked() -> None:
    z = torch.ones(2, 2)
    with pytest.raises(InvalidType, match=r"expected torch\.float32, got torch\.float64"):
        make(lambda z: z.double(), z)[0](z)
    with pytest.raises(InvalidArgument, match=r"expected \(2, 2\), got \(2, 1\)"):
        make(lambda z: z[:, :1], z)[0](z)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("state", [torch.float32, torch.float64])
def test_a_lower_precision_than_that_of_the_state_is_refused_outside_autocast(low: torch.dtype, state: torch.dtype) -> None:
    z = torch.ones(2, 2, dtype=state)
    with pytest.raises(InvalidType, match=f"expected {state}, got {low}"):
        wp.fixed_point(lambda z: (0.5 * z).to(low), z)
    with pytest.raises(InvalidType, match=f"expected {state}, got {low}"):
        wp.EquilibriumLayer(lambda z, x: (0.5 * z + x).to(low))(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wp.fixed_point(lambda z: (0.5 * z).to(low), z, on_failure="ignore").value.dtype == state


def test_in_place_change_is_seen_whatever_is_returned() -> None:
    def f(z: Tensor) -> Tensor:
        z += 1
        return torch.zeros_like(z)

    with pytest.raises(InvalidArgument, match="f changed its argument in place"):
        make(f, torch.ones(2, 2))[0](torch.ones(2, 2))


def test_defaults_of_a_map() -> None:
    class Half(AbstractMap):
        def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
            return 0.5 * z

        def take(self, rows: Tensor) -> Half:
            return self

    f, z = Half(), gaussian(2, 3, seed=1)
    assert f.inputs() == () and f.with_inputs() is f and not f.writes_out
    assert torch.equal(f.tracked(z), 0.5 * z)
    assert torch.equal(f.jacobian(z).dense(), 0.5 * torch.eye(3, dtype=DOUBLE).expand(2, 3, 3))


def test_jacobian_of_rows_matches_the_dense_one() -> None:
    p = problem("tanh")
    f = FunctionMap(p.f, Layout.of(p.z0, "z0"), p.args)
    J = f.jacobian(p.z0).dense()
    slope = 1 - p.image(p.z0) ** 2
    assert torch.allclose(J, slope.unsqueeze(2) * p.matrix, rtol=1e-12)
