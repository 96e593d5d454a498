"""Training with a frozen kernel: against integration, matrix exponentials, the descent itself, and least squares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import InvalidArgument, InvalidType, WellposedWarning
from wellposed.kernel import KernelMachine, population_gram, relu_gram

F64 = torch.float64


def problem(n: int = 6, p: int = 4, outputs: tuple[int, ...] = (), seed: int = 0):
    """Kernel, cross kernel, targets and starts on both sets of inputs."""
    generator = torch.Generator().manual_seed(seed)
    X, X_new = (torch.randn(k, 5, generator=generator, dtype=F64) for k in (n, p))
    y, f0 = (torch.randn(n, *outputs, generator=generator, dtype=F64) for _ in range(2))
    f0_new = torch.randn(p, *outputs, generator=generator, dtype=F64)
    return relu_gram(X), relu_gram(X_new, X), y, f0, f0_new


@pytest.mark.parametrize("outputs", [(), (3,)], ids=str)
def test_euler_integration(outputs):
    H, k, y, f0, f0_new = problem(outputs=outputs)
    machine, f, g, h = KernelMachine(H, y, f0), f0.clone(), f0_new.clone(), 1e-4
    for _ in range(10_000):
        f, g = f - h * H @ (f - y), g - h * k @ (f - y)
    torch.testing.assert_close(machine.predict(1.0), f, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(machine.predict(1.0, k, f0_new), g, rtol=0.0, atol=1e-3)
    assert float(machine.loss(1.0)) == pytest.approx(float(((f - y) ** 2).sum() / 2), rel=1e-3)


@pytest.mark.parametrize("outputs", [(), (3,)], ids=str)
def test_matrix_exponential_and_many_times(outputs):
    H, k, y, f0, f0_new = problem(outputs=outputs)
    machine, times = KernelMachine(H, y, f0), [0.0, 0.3, 2.0, 50.0]
    train, new, losses = machine.predict(times), machine.predict(torch.tensor(times, dtype=F64), k, f0_new), machine.loss(times)
    assert train.shape == (4, *y.shape)
    assert new.shape == (4, *f0_new.shape)
    for i, t in enumerate(times):
        decay = torch.linalg.matrix_exp(-H * t)
        torch.testing.assert_close(train[i], y + decay @ (f0 - y), rtol=1e-10, atol=1e-12)
        moved = torch.linalg.solve(H, (y - f0) - decay @ (y - f0))
        torch.testing.assert_close(new[i], f0_new + k @ moved, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(losses[i], ((train[i] - y) ** 2).sum() / 2, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(machine.predict(t), train[i], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(machine.predict(t, H, f0), train[i], rtol=1e-10, atol=1e-11)  # old inputs as new ones


def test_the_end_is_kernel_regression_by_least_squares():
    H, k, y, f0, f0_new = problem()
    machine = KernelMachine(H, y, f0)
    weights = np.linalg.lstsq(H.numpy(), (y - f0).numpy(), rcond=None)[0]
    torch.testing.assert_close(
        machine.predict(math.inf, k, f0_new), f0_new + k @ torch.as_tensor(weights), rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(machine.predict(math.inf), y, rtol=0.0, atol=0.0)
    assert float(machine.loss(math.inf)) == 0.0
    torch.testing.assert_close(machine.predict(1e9, k), machine.predict(math.inf, k), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("part", [1e-9, 0.1, 0.6, 0.99, 1.2])
def test_gradient_descent_step_by_step(part):
    """`part` of the largest convergent step size; above 1 it diverges, and so must the formula."""
    H, k, y, f0, f0_new = problem(outputs=(2,))
    machine = KernelMachine(H, y, f0)
    step_size, f, g = part * machine.max_step_size, f0.clone(), f0_new.clone()
    for num_steps in range(30):
        torch.testing.assert_close(machine.predict_descent(num_steps, step_size), f, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(machine.predict_descent(num_steps, step_size, k, f0=f0_new), g, rtol=1e-9, atol=1e-11)
        assert float(machine.loss_descent(num_steps, step_size)) == pytest.approx(float(((f - y) ** 2).sum() / 2), rel=1e-9)
        f, g = f - step_size * H @ (f - y), g - step_size * k @ (f - y)
    assert machine.predict_descent([0, 5, 29], step_size, k).shape == (3, 4, 2)
    assert machine.loss_descent(torch.arange(4), step_size).shape == (4,)


def test_a_short_time_keeps_its_digits():
    """What is learnt in a tiny time is tiny, and 1 - e^(-H t) would leave 4 digits of it."""
    H, k, y, f0, _ = problem()
    machine = KernelMachine(H, y, f0)
    torch.testing.assert_close(machine.predict(1e-12, k), 1e-12 * k @ (y - f0), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(machine.predict_descent(3, 1e-13, k), 3e-13 * k @ (y - f0), rtol=1e-9, atol=0.0)


def test_many_tiny_steps_are_the_flow():
    H, k, y, f0, _ = problem()
    machine = KernelMachine(H, y, f0)
    torch.testing.assert_close(machine.predict_descent(10**9, 1e-9, k), machine.predict(1.0, k), rtol=1e-7, atol=1e-8)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 7), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_the_flow_composes_and_the_loss_falls(seed, n, t, u):
    H, _, y, f0, _ = problem(n, seed=seed)
    machine = KernelMachine(H, y, f0, on_failure="ignore")
    torch.testing.assert_close(
        KernelMachine(H, y, machine.predict(t), on_failure="ignore").predict(u), machine.predict(t + u), rtol=1e-9, atol=1e-10
    )
    rate = 2 * float(machine.eigenvalues[0])
    assert float(machine.loss(t)) <= float(machine.loss(0.0)) * math.exp(-rate * t) * (1 + 1e-9) + 1e-18


def test_equal_inputs_freeze_a_direction_and_say_so():
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    X[4] = X[0]
    H, y = population_gram(X, 0.2), torch.tensor([1.0, 2.0, 3.0, 4.0, 3.0], dtype=F64)
    with pytest.warns(WellposedWarning, match="1 of 5 directions .* frozen; they hold") as caught:
        machine = KernelMachine(H, y)
    assert caught[0].filename == __file__
    assert machine.num_frozen == 1
    expected = torch.tensor([2.0, 2.0, 3.0, 4.0, 2.0], dtype=F64)  # the two labels of one input are averaged
    torch.testing.assert_close(machine.predict(math.inf), expected, rtol=1e-12, atol=0.0)
    k = population_gram(torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=F64), 0.2, X)
    torch.testing.assert_close(machine.predict(math.inf, k), k @ torch.linalg.pinv(H, rtol=1e-12) @ y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(machine.predict(1e30, k), machine.predict(math.inf, k), rtol=1e-12, atol=0.0)
    assert float(machine.loss(math.inf)) == pytest.approx(1.0)
    with pytest.raises(InvalidArgument, match="1 of 5 directions"):
        KernelMachine(H, y, on_failure="raise")


def test_norm():
    H, _, y, f0, _ = problem(outputs=(2,))
    r = y - f0
    expected = torch.stack([torch.sqrt(r[:, i] @ torch.linalg.solve(H, r[:, i])) for i in range(2)])
    torch.testing.assert_close(KernelMachine(H, y, f0).norm, expected, rtol=1e-10, atol=0.0)
    assert KernelMachine(H, y[:, 0]).norm.shape == ()


def test_a_real_network_that_is_linear_in_its_parameters():
    """Features times weights, trained by gradient descent on the weights: the kernel is constant and all is exact."""
    generator = torch.Generator().manual_seed(2)
    Phi, Phi_new = (torch.randn(n, 12, generator=generator, dtype=F64) for n in (5, 3))
    w, y = torch.randn(12, generator=generator, dtype=F64), torch.randn(5, generator=generator, dtype=F64)
    machine = KernelMachine(Phi @ Phi.T, y, Phi @ w)
    f0_new = Phi_new @ w
    for _ in range(40):
        w = w - 0.01 * Phi.T @ (Phi @ w - y)
    torch.testing.assert_close(machine.predict_descent(40, 0.01), Phi @ w, rtol=1e-10, atol=1e-12)
    predicted = machine.predict_descent(40, 0.01, Phi_new @ Phi.T, f0=f0_new)
    torch.testing.assert_close(predicted, Phi_new @ w, rtol=1e-10, atol=1e-12)


def test_one_sample_zero_kernel_float32():
    machine = KernelMachine(torch.tensor([[2.0]]), torch.tensor([1.0]))
    assert machine.predict(0.5).dtype == torch.float32
    assert float(machine.predict(0.5)) == pytest.approx(1 - math.exp(-1), rel=1e-6)
    nothing = KernelMachine(torch.zeros(2, 2), torch.ones(2), on_failure="ignore")
    assert nothing.max_step_size == math.inf
    assert torch.equal(nothing.predict(math.inf), torch.zeros(2))
    H, k, y, f0, _ = problem()
    single = KernelMachine(H.float(), y.float(), f0.float()).predict([0.1, 1.0], k.float())
    torch.testing.assert_close(single.double(), KernelMachine(H, y, f0).predict([0.1, 1.0], k), rtol=1e-3, atol=1e-4)


def test_gradients_with_respect_to_kernel_and_targets():
    H, k, y, f0, _ = problem(4)
    B = torch.linalg.cholesky(H).requires_grad_()
    inputs = (B, k.requires_grad_(), y.requires_grad_(), f0.requires_grad_())
    assert torch.autograd.gradcheck(lambda B, k, y, f0: KernelMachine(B @ B.T, y, f0).predict([0.5, math.inf], k), inputs)


H2, Y2 = torch.eye(2, dtype=F64), torch.ones(2, dtype=F64)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: KernelMachine([[1.0]], Y2), InvalidType, "H must be a tensor, got list"),
        (lambda: KernelMachine(H2[:1], Y2), InvalidArgument, r"H must be \(n, n\) with n >= 1, got \(1, 2\)"),
        (lambda: KernelMachine(H2[:0, :0], Y2), InvalidArgument, r"got \(0, 0\)"),
        (lambda: KernelMachine(H2.long(), Y2), InvalidArgument, "float32 or float64, got torch.int64"),
        (lambda: KernelMachine(H2 * math.nan, Y2), InvalidArgument, "H has 4 entries that are NaN"),
        (lambda: KernelMachine(H2.cumsum(0), Y2), InvalidArgument, "H must be symmetric"),
        (lambda: KernelMachine(-H2, Y2), InvalidArgument, "positive semi-definite, and has eigenvalues from -1"),
        (lambda: KernelMachine(H2, None), InvalidType, "y must be a tensor"),
        (lambda: KernelMachine(H2, torch.ones(3, dtype=F64)), InvalidArgument, r"got y of shape \(3,\)"),
        (lambda: KernelMachine(H2, Y2, Y2[:, None]), InvalidArgument, r"got f0 of shape \(2, 1\)"),
        (lambda: KernelMachine(H2, Y2.float()), InvalidArgument, "y must have the dtype and device of H"),
        (lambda: KernelMachine(H2, Y2, rtol=1.0), InvalidArgument, r"'rtol' must be in \[0, 1\)"),
        (lambda: KernelMachine(H2, Y2, on_failure="warm"), InvalidArgument, "Did you mean 'warn'"),
        (lambda: KernelMachine(H2, Y2).predict(-1.0), InvalidArgument, "each at least 0, got -1.0"),
        (lambda: KernelMachine(H2, Y2).predict(math.nan), InvalidArgument, "each at least 0, got nan"),
        (lambda: KernelMachine(H2, Y2).predict(1.0, f0=Y2), InvalidArgument, "only with cross"),
        (lambda: KernelMachine(H2, Y2).predict(1.0, H2[:, :1]), InvalidArgument, r"cross must be \(p, 2\)"),
        (lambda: KernelMachine(H2, Y2).predict(1.0, H2[:1], Y2), InvalidArgument, r"f0 must be \(1,\)"),
        (lambda: KernelMachine(H2, Y2).predict_descent(1.5, 0.1), InvalidArgument, "num_steps must be an integer"),
        (lambda: KernelMachine(H2, Y2).predict_descent(-1, 0.1), InvalidArgument, "each at least 0, got -1"),
        (lambda: KernelMachine(H2, Y2).predict_descent(1, 0.0), InvalidArgument, "step_size must be a finite number above 0"),
    ],
)
def test_wrong_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()
