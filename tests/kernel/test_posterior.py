"""Gaussian processes and ensembles of trained models from a kernel machine: against dense algebra, autograd and sampling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import InvalidArgument
from wellposed.kernel import KernelMachine, deq_ntk, linearised, population_gram, relu_gram

F64 = torch.float64
EPS = torch.finfo(F64).eps


def problem(n: int = 8, p: int = 4, outputs: tuple[int, ...] = (), seed: int = 0):
    """Kernel of training inputs, cross kernel, diagonal of the new ones; targets and prior means."""
    generator = torch.Generator().manual_seed(seed)
    X, X_new = (torch.randn(k, 5, generator=generator, dtype=F64) for k in (n, p))
    y, f0 = (torch.randn(n, *outputs, generator=generator, dtype=F64) for _ in range(2))
    f0_new = torch.randn(p, *outputs, generator=generator, dtype=F64)
    return relu_gram(X), relu_gram(X_new, X), relu_gram(X_new).diagonal(), y, f0, f0_new


@pytest.mark.parametrize("outputs", [(), (3,)], ids=str)
def test_posterior_is_that_of_dense_algebra(outputs):
    H, k, d, y, f0, f0_new = problem(outputs=outputs)
    A = H + 0.3 * torch.eye(len(H), dtype=F64)
    machine = KernelMachine(H, y, f0)
    mean, variance = machine.posterior(k, d, noise=0.3, f0=f0_new)
    torch.testing.assert_close(mean, f0_new + k @ torch.linalg.solve(A, y - f0), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(variance, d - (k * torch.linalg.solve(A, k.T).T).sum(1), rtol=1e-9, atol=1e-11)
    mean, variance = machine.posterior(noise=0.3)  # on the training inputs
    torch.testing.assert_close(mean, f0 + H @ torch.linalg.solve(A, y - f0), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(variance, (H - H @ torch.linalg.solve(A, H)).diagonal(), rtol=1e-9, atol=1e-11)


def test_the_posterior_takes_a_factor_and_not_the_eigenvectors(monkeypatch):
    """The same numbers from both, and the spectrum only where it is asked for."""
    H, k, d, y, f0, f0_new = problem(outputs=(3,))
    with monkeypatch.context() as patch:
        patch.setattr(linearised, "spectrum", None)  # calling it would be an error
        quick = KernelMachine(H, y, f0)
        found = [*quick.posterior(k, d, noise=0.3, f0=f0_new), quick.log_likelihood(0.3)]
        assert quick._factor is not None and quick.posterior(k[:1], d[:1], noise=0.3)[0].shape == (1, 3)
    slow = KernelMachine(H, y, f0)
    assert slow.num_frozen == 0  # from the spectrum, which then serves
    for a, b in zip(found, [*slow.posterior(k, d, noise=0.3, f0=f0_new), slow.log_likelihood(0.3)], strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e3 * EPS * float(H.diagonal().max()) / 0.3 * float(b.abs().max()))
    other = quick.posterior(k, d, noise=0.6, f0=f0_new)[1]  # another noise, another factor
    torch.testing.assert_close(other, slow.posterior(k, d, noise=0.6)[1], rtol=1e-12, atol=1e-13)


def test_a_lazy_spectrum_has_the_graph_of_its_kernel():
    H, k, d, y, *_ = problem()
    H.requires_grad_()
    machine = KernelMachine(H, y)
    with torch.no_grad():
        machine.predict(1.0)  # the spectrum is made here
    assert machine.predict(1.0).requires_grad
    machine = KernelMachine(H.detach(), y)
    with torch.inference_mode():
        machine.posterior(k, d, noise=0.3)  # and the factor here
    k.requires_grad_()
    machine.posterior(k, d, noise=0.3)[1].sum().backward()
    A = H.detach() + 0.3 * torch.eye(len(H), dtype=F64)
    torch.testing.assert_close(k.grad, -2 * torch.linalg.solve(A, k.detach().T).T, rtol=1e-10, atol=1e-12)


def test_without_noise_frozen_directions_take_no_part():
    H, k, d, y, *_ = problem()
    twice = torch.arange(8).repeat(2)  # every input twice, with the same target
    machine = KernelMachine(H[twice][:, twice], y[twice], on_failure="ignore")
    assert machine.num_frozen == 8
    mean, variance = machine.posterior(k[:, twice], d, noise=0.0)
    expected, expected_variance = KernelMachine(H, y).posterior(k, d, noise=0.0)
    torch.testing.assert_close(mean, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(variance, expected_variance, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("noise", [1e-15, 1e-20, 1e-30])
def test_noise_below_rounding_is_no_noise(noise):
    """Equal inputs with other targets: 1/noise would multiply the rounding errors of their directions."""
    H, k, d, y, *_ = problem()
    twice = torch.arange(8).repeat(2)
    machine = KernelMachine(H[twice][:, twice], torch.cat([y, y + 1]), on_failure="ignore")
    mean, variance = machine.posterior(k[:, twice], d, noise=noise)
    expected, expected_variance = KernelMachine(H, y + 0.5).posterior(k, d, noise=0.0)
    torch.testing.assert_close(mean, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(variance, expected_variance, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("outputs", [(), (3,)], ids=str)
def test_log_likelihood_and_its_gradient(outputs):
    H, _, _, y, f0, _ = problem(outputs=outputs)
    noise = torch.tensor(0.2, dtype=F64, requires_grad=True)
    value = KernelMachine(H, y, f0).log_likelihood(noise)
    other = noise.detach().clone().requires_grad_()
    normal = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=F64), H + other * torch.eye(8, dtype=F64))
    expected = normal.log_prob((y - f0).reshape(8, -1).T).sum()
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(*(torch.autograd.grad(f, v)[0] for f, v in ((value, noise), (expected, other))))


@pytest.mark.parametrize("t", [0.0, 0.4, 30.0, math.inf])
def test_variance_of_an_ensemble_with_any_start(t):
    H, k, d, y, *_ = problem()
    machine = KernelMachine(H, y)
    decay = torch.linalg.matrix_exp(-H * t) if math.isfinite(t) else torch.zeros_like(H)
    A = k @ torch.linalg.solve(H, torch.eye(8, dtype=F64) - decay)
    K, K_cross, K_new = 2 * H @ H, 2 * k @ H, 2 * (k @ k.T).diagonal()  # some other covariance of starts
    torch.testing.assert_close(
        machine.variance(t, k, K_new, start=(K, K_cross)),
        (K_new + (A @ K @ A.T - 2 * A @ K_cross.T).diagonal()).clamp(min=0.0),
        rtol=1e-8,
        atol=1e-9,
    )
    # the covariance H is the default, and has a formula of its own
    torch.testing.assert_close(machine.variance(t, k, d), machine.variance(t, k, d, start=(H, k)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("t", [0.0, 0.4, 30.0, math.inf])
def test_variance_of_an_ensemble_on_its_training_inputs(t):
    H, _, _, y, *_ = problem()
    machine, K = KernelMachine(H, y), 2 * H @ H + torch.eye(8, dtype=F64)
    decay = torch.linalg.matrix_exp(-H * t) if math.isfinite(t) else torch.zeros_like(H)
    # f_t - y = e^(-H t) (f_0 - y): the covariance is e^(-H t) K e^(-H t)
    found, expected = machine.variance(t, start=(K, K)), (decay @ K @ decay).diagonal()
    condition = float(torch.linalg.cond(H))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=64 * EPS * condition * float(K.diagonal().max()))
    assert t > 0 or torch.equal(found, K.diagonal())  # that of the starts themselves


def test_on_the_training_inputs_the_covariances_of_the_starts_are_the_same():
    H, k, d, y, *_ = problem()
    machine = KernelMachine(H, y)
    with pytest.raises(InvalidArgument, match=r"both covariances of start are the same.* differ by .* Pass start=.K, K."):
        machine.variance(1.0, start=(H, 2 * H))
    with pytest.raises(InvalidArgument, match="the diagonal of start must be at least 0"):
        machine.variance(1.0, start=(-H, -H))


def test_the_end_of_training_is_the_noiseless_posterior():
    H, k, d, y, *_ = problem()
    machine = KernelMachine(H, y)
    mean, variance = machine.posterior(k, d, noise=0.0)
    torch.testing.assert_close(machine.predict(math.inf, k), mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(machine.variance(math.inf, k, d), variance, rtol=1e-10, atol=1e-12)
    times = machine.variance([0.0, 1.0, math.inf], k, d)
    assert times.shape == (3, 4)
    torch.testing.assert_close(times[0], d)  # nothing is learnt at the start
    assert machine.variance(math.inf).max() < 1e-12 * H.max()  # and nothing is unknown on the training inputs at the end


def test_many_trained_linear_models():
    """Standard normal weights of a linear model, trained by gradient descent to the time t."""
    generator = torch.Generator().manual_seed(1)
    Phi, Phi_new = (torch.randn(k, 6, generator=generator, dtype=F64) for k in (4, 3))
    y, step_size, num_steps, draws = torch.randn(4, generator=generator, dtype=F64), 1e-3, 700, 20_000
    W = torch.randn(6, draws, generator=generator, dtype=F64)
    for _ in range(num_steps):
        W = W - step_size * Phi.T @ (Phi @ W - y[:, None])
    trained = Phi_new @ W
    machine = KernelMachine(Phi @ Phi.T, y)
    cross, diagonal, t = Phi_new @ Phi.T, (Phi_new**2).sum(1), step_size * num_steps
    variance = machine.variance(t, cross, diagonal)
    # 20,000 draws: an error of the variance of 1 % of itself (one sigma); the Euler step adds about 1e-3
    torch.testing.assert_close(trained.var(dim=1), variance, rtol=0.06, atol=0.0)
    spread = float((variance / draws).sqrt().max())
    torch.testing.assert_close(trained.mean(dim=1), machine.predict(t, cross), rtol=0.02, atol=6 * spread)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(1e-3, 10.0))
def test_data_never_raise_the_variance_and_noise_never_lowers_it(seed, noise):
    H, k, d, y, *_ = problem(seed=seed)
    machine = KernelMachine(H, y, on_failure="ignore")
    less, more = (machine.posterior(k, d, noise=value)[1] for value in (noise, 2 * noise))
    slack = 64 * len(H) * EPS * float(H.diagonal().max()) / noise * float(H.diagonal().max() + noise)
    assert (less >= 0).all() and (less <= more + slack).all() and (more <= d + slack).all()
    times = machine.variance([0.1, 1.0, 10.0], k, d)
    assert (times[1:] <= times[:-1] + slack).all()


def test_wide_equilibrium_networks_start_with_the_gram_matrix():
    """Posterior of trained networks: the starts have the covariance of the read-out, the tangent kernel trains."""
    X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    H, K = deq_ntk(X, weight_variance=0.1), population_gram(X, 0.1)
    machine = KernelMachine(H[:8, :8], torch.sin(X[:8, 0]))
    variance = machine.variance(math.inf, H[8:, :8], K[8:, 8:].diagonal(), start=(K[:8, :8], K[8:, :8]))
    assert ((0 < variance) & (variance < K.diagonal()[8:])).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_kernels_that_do_not_belong_together_are_refused(dtype):
    """A diagonal of another kernel: the variance would be negative, and 0 would be a false certainty."""
    H, k, d, y, *_ = (value.to(dtype) for value in problem())
    message = "variance of a new input would be -.*, so H, cross and diagonal are not of one kernel. Compute all of them"
    for machine in (KernelMachine(H, y), spectral := KernelMachine(H, y)):
        assert machine is not spectral or spectral.num_frozen == 0  # asks for the spectrum
        with pytest.raises(InvalidArgument, match=message):
            machine.posterior(k, 0.01 * d, noise=0.01)
        machine.posterior(k, d, noise=0.01)
    for t in (5.0, math.inf, [0.0, math.inf]):
        with pytest.raises(InvalidArgument, match=message):
            spectral.variance(t, k, 0.01 * d)
    with pytest.raises(InvalidArgument, match=message):
        spectral.variance(math.inf, k, 0.01 * d, start=(H, k))


def test_rounding_below_zero_is_zero():
    """New inputs that are training inputs, without noise: the variance is 0, less rounding."""
    H, _, _, y, *_ = problem(n=40)  # 5 features: condition 1e4
    for machine in (KernelMachine(H, y), spectral := KernelMachine(H, y)):
        assert machine is not spectral or spectral.num_frozen == 0
        variance = machine.posterior(H, H.diagonal(), noise=0.0)[1]
        assert (variance >= 0).all() and float(variance.max()) < 1e4 * EPS * float(H.diagonal().max())


def test_no_likelihood_with_less_noise_than_rounding():
    """Frozen eigenvalues count as 0, and are not known to 1e-20: the logarithm of their sum with the noise is not either."""
    H, _, _, y, *_ = problem()
    twice = torch.arange(8).repeat(2)
    machine = KernelMachine(H[twice][:, twice], y[twice], on_failure="ignore")
    for noise in (1e-20, torch.tensor(1e-20, dtype=F64, requires_grad=True)):
        with pytest.raises(InvalidArgument, match="noise=1e-20 is below the rounding errors .* of 8 frozen .* above "):
            machine.log_likelihood(noise)
    assert math.isfinite(float(machine.log_likelihood(1e-6)))


def test_bad_arguments_are_named():
    H, k, d, y, *_ = problem()
    machine = KernelMachine(H, y)
    with pytest.raises(InvalidArgument, match="'noise' must be a finite number at least 0, got -1"):
        machine.posterior(k, d, noise=-1.0)
    with pytest.raises(InvalidArgument, match="'noise' must be a finite number above 0, got 0"):
        machine.log_likelihood(0.0)
    with pytest.raises(InvalidArgument, match="diagonal must be at least 0, .*; got -"):
        machine.posterior(k, -d, noise=1.0)
    with pytest.raises(InvalidArgument, match="both cross .* and diagonal"):
        machine.posterior(k, noise=1.0)
    with pytest.raises(InvalidArgument, match=r"diagonal \(p,\); got \(4, 8\) and \(3,\)"):
        machine.variance(1.0, k, d[:3])
    with pytest.raises(InvalidArgument, match=r"start must be of shapes \(8, 8\) and \(4, 8\)"):
        machine.variance(1.0, k, d, start=(H, k.T))
