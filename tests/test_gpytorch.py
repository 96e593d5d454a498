"""Kernels for gpytorch and linear_operator: against dense algebra, and the suite of linear_operator itself."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wellposed as wp
import wellposed.gpytorch
from wellposed.errors import InvalidArgument, MissingPackage, NotConverged, WellposedWarning
from wellposed.gpytorch import KernelOperator, NetworkKernel, WideKernel, solve
from wellposed.kernel import WideLayer, deq_ntk, tangent_kernel
from wellposed.kernel._conjugate import factored_solve

F64 = torch.float64


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellposed.kernel._kernel_operator.MISSING", True)
    for make in (WideKernel, lambda: NetworkKernel(torch.nn.Linear(2, 1)), lambda: solve(None, torch.ones(1))):
        with pytest.raises(MissingPackage, match=r"install them with: pip install -c constraints.txt '\.\[gp\]'"):
            make()


gpytorch: Any = pytest.importorskip("gpytorch", reason="the extra 'gp' is not installed")
linear_operator: Any = pytest.importorskip("linear_operator", reason="the extra 'gp' is not installed")

from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase  # noqa: E402


def samples(n: int, d: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def network(width: int = 20, d: int = 5) -> torch.nn.Module:
    return wp.GaussianDEQ(d, width, generator=torch.Generator().manual_seed(0), dtype=F64)


KERNELS = {
    "wide": lambda: WideKernel(0.1, width=10).double(),
    "gram": lambda: WideKernel(0.1, readout_variance=0.0).double(),
    "network": lambda: NetworkKernel(network()),
    "monotone": lambda: NetworkKernel(wp.MonotoneDEQ(5, 6, generator=torch.Generator().manual_seed(0), dtype=F64)),
    "module": lambda: NetworkKernel(
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    ),
}


def dense(name: str, kernel: Any, X: Tensor, X2: Tensor | None = None) -> Tensor:
    if name in ("wide", "gram"):
        options: Any = {"wide": {"width": 10}, "gram": {"readout_variance": 0.0}}[name]
        return deq_ntk(X, X2, weight_variance=float(kernel.weight_variance.detach()), **options)
    return tangent_kernel(kernel._network[0], X, X2)


@pytest.mark.parametrize("name", KERNELS)
def test_products_entries_and_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, X, X2 = KERNELS[name](), samples(11), samples(7, seed=1)
    for second in (None, X2):
        K = dense(name, kernel, X, second)
        whole = kernel.operator(X, second)
        v = samples(K.shape[1], 3, seed=2)
        options: Any = whole._nondifferentiable_kwargs
        for operator in (
            whole,
            KernelOperator(whole.x1, whole.x2, *whole.hyper, function=whole.function, block_size=4, memory=0),
            KernelOperator(whole.x1, whole.x2, *whole.hyper, **(options | {"block_size": 4})),
        ):
            scale = float(K.abs().max()) * 5 * K.shape[1]
            close: Any = {"rtol": 0.0, "atol": 1e-13 * scale}
            for _ in range(2):  # the second time with the blocks that are kept
                torch.testing.assert_close(operator @ v, K @ v, **close)
            torch.testing.assert_close(operator.mT @ samples(11, 2), K.mT @ samples(11, 2), **close)
            torch.testing.assert_close(operator.to_dense(), K, **close)
            torch.testing.assert_close(operator[2:5, 1:6].to_dense(), K[2:5, 1:6], **close)
            torch.testing.assert_close(operator[3], K[3], **close)
            i, j = torch.tensor([0, 10, 4, 4]), torch.tensor([6, 0, 2, 3])
            torch.testing.assert_close(operator[i, j], K[i, j], **close)
            with monkeypatch.context() as patch:
                patch.setattr("wellposed.kernel._kernel_operator._DIAGONAL", 2)  # entries one by one
                torch.testing.assert_close(operator[i, j], K[i, j], **close)
                if second is None:
                    torch.testing.assert_close(operator.diagonal(), K.diagonal(), **close)
    torch.testing.assert_close(kernel(X, diag=True), dense(name, kernel, X).diagonal(), rtol=1e-12, atol=1e-12)


class TestWideOperator(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_test_sample = False
    skip_slq_tests = True
    # These need batches of matrices, which the operator has not.
    test_add = test_cat_rows = test_expand = test_reshape = test_squeeze_unsqueeze = None
    test_matmul_matrix_broadcast = test_rmatmul_matrix_broadcast = test_solve_matrix_broadcast = None

    def create_linear_op(self) -> Any:
        X = samples(5).float()
        return KernelOperator(X, X, torch.tensor(0.1), function=WideKernel()._function, block_size=2)

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        return deq_ntk(linear_op.x1, linear_op.x2, weight_variance=linear_op.hyper[0])


class GP(gpytorch.models.ExactGP):
    def __init__(self, X: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(X, y, likelihood)
        self.mean, self.kernel = gpytorch.means.ZeroMean(), kernel

    def forward(self, X: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(X), self.kernel(X))


def gaussian_process(kernel: Any, n: int, noise: float = 0.05) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    X, X_new = samples(n), samples(9, seed=1)
    y = torch.sin(2 * X[:, 0]) + 0.1 * samples(n, 1, seed=2)[:, 0]
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise
    return GP(X, y, likelihood, kernel).double(), likelihood, X, y, X_new


def cholesky(K: Tensor, k: Tensor, d: Tensor, y: Tensor, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Mean and variance by dense algebra."""
    L = torch.linalg.cholesky(K + noise * torch.eye(len(K), dtype=F64))
    half = torch.linalg.solve_triangular(L, k.mT, upper=False)
    return k @ torch.cholesky_solve(y[:, None], L)[:, 0], d - (half * half).sum(0)


@pytest.mark.parametrize("name", KERNELS)
def test_an_exact_gaussian_process(name: str) -> None:
    gp, likelihood, X, y, X_new = gaussian_process(KERNELS[name](), 60)
    mean, variance = cholesky(
        dense(name, gp.kernel, X), dense(name, gp.kernel, X_new, X), dense(name, gp.kernel, X_new).diagonal(), y
    )
    gp.eval(), likelihood.eval()
    with torch.no_grad(), gpytorch.settings.cholesky_jitter(double_value=1e-12):
        posterior = gp(X_new)
        torch.testing.assert_close(posterior.mean, mean, rtol=0.0, atol=1e-7)
        torch.testing.assert_close(posterior.variance, variance, rtol=0.0, atol=1e-7)
        torch.testing.assert_close(likelihood(posterior).variance, variance + 0.05, rtol=0.0, atol=1e-7)


def test_marginal_likelihood_and_its_gradients() -> None:
    """By gpytorch with the operator, and by autograd through the dense kernel."""
    gp, likelihood, X, y, _ = gaussian_process(WideKernel(0.1, width=10), 40)
    gp.train(), likelihood.train()
    value = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)(gp(X), y) * len(y)
    value.backward()
    s, noise = (torch.tensor(number, dtype=F64, requires_grad=True) for number in (0.1, 0.05))
    covariance = deq_ntk(X, weight_variance=s, width=10) + noise * torch.eye(40, dtype=F64)
    expected = torch.distributions.MultivariateNormal(torch.zeros(40, dtype=F64), covariance).log_prob(y)
    expected.backward()
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-6, atol=0.0)
    # d s/d raw = s (1 - s) for the interval (0, 1); the noise is softplus(raw) + 1e-4
    chain = float((gp.kernel.weight_variance * (1 - gp.kernel.weight_variance)).detach())
    torch.testing.assert_close(gp.kernel.raw_weight_variance.grad, s.grad * chain, rtol=1e-5, atol=0.0)
    raw = likelihood.noise_covar.raw_noise
    torch.testing.assert_close(raw.grad[0], noise.grad * torch.sigmoid(raw.detach())[0], rtol=1e-5, atol=0.0)


def test_loose_solves_of_gpytorch_are_reported() -> None:
    """Above its largest size for a factor, gpytorch ends at residuals of some percent."""
    kernel, X = KERNELS["wide"](), samples(30)
    with gpytorch.settings.max_cholesky_size(29):
        with pytest.warns(WellposedWarning, match=r"more than 29 samples .* with these 30. Use .*max_cholesky_size.30."):
            kernel(X).to_dense()
        kernel(X, diag=True), kernel(X, samples(31, seed=1)).to_dense(), kernel.operator(X).to_dense()
        with gpytorch.settings.fast_computations(False, False, False):
            kernel(X).to_dense()
    with gpytorch.settings.max_cholesky_size(30):
        kernel(X).to_dense()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "network"])
def test_two_thousand_samples_by_gpytorch_agree_with_cholesky(name: str) -> None:
    """Mean, variance and likelihood with the setting that the warning names."""
    gp, likelihood, X, y, X_new = gaussian_process(KERNELS[name](), 2000)
    K = dense(name, gp.kernel, X)
    mean, variance = cholesky(K, dense(name, gp.kernel, X_new, X), dense(name, gp.kernel, X_new).diagonal(), y)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(2009):
        value = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)(gp(X), y)
        gp.eval(), likelihood.eval()
        posterior = gp(X_new)
        torch.testing.assert_close(posterior.mean, mean, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(posterior.variance, variance, rtol=0.0, atol=1e-6)
    noisy = K + 0.05 * torch.eye(2000, dtype=F64)
    expected = torch.distributions.MultivariateNormal(torch.zeros(2000, dtype=F64), noisy).log_prob(y) / 2000
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0.0)


@pytest.mark.slow
def test_hyper_parameters_are_learnt_by_gradient() -> None:
    """Data drawn from the process itself: what is learnt is at least as likely as the truth."""
    X, generator = samples(150, 3), torch.Generator().manual_seed(3)
    K = deq_ntk(X, weight_variance=0.5) + 0.04 * torch.eye(150, dtype=F64)
    y = torch.linalg.cholesky(K) @ torch.randn(150, generator=generator, dtype=F64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    gp = GP(X, y, likelihood, WideKernel(0.1)).double()
    likelihood.noise = 1.0
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = -mll(gp(X), y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    truth = -float(torch.distributions.MultivariateNormal(torch.zeros(150, dtype=F64), K).log_prob(y)) / 150
    assert losses[0] > truth + 0.1  # the start was far off
    assert losses[-1] < truth + 1e-3


@pytest.mark.parametrize("name", ["wide", "network"])
def test_solves_reach_what_the_conjugate_gradients_of_the_package_do_not(name: str) -> None:
    kernel, X = KERNELS[name](), samples(100)
    y = torch.sin(X[:, 0])
    operator = kernel.operator(X).detach().add_diagonal(torch.tensor(1e-2, dtype=F64))
    A = dense(name, kernel, X) + 1e-2 * torch.eye(100, dtype=F64)
    columns = torch.stack([y, y, torch.zeros_like(y)], dim=1)
    for rank, targets in ((1, y), (20, y), (20, columns)):
        a = solve(operator, targets, rtol=1e-12, rank=rank, dense=0)
        assert a.shape == targets.shape
        assert float((A @ a - targets).norm()) <= 2e-12 * float(targets.norm())
    with pytest.raises(NotConverged, match="after max_steps=2, above rtol=1e-12. Raise the noise"):
        solve(operator, y, rtol=1e-12, max_steps=2, rank=1, dense=0)


def test_a_small_matrix_is_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, X = KERNELS["wide"](), samples(60)
    y, noise = torch.sin(X[:, :2]), torch.tensor(1e-2, dtype=F64)
    operator = kernel.operator(X).detach().add_diagonal(noise)
    A = dense("wide", kernel, X) + noise * torch.eye(60, dtype=F64)
    with monkeypatch.context() as patch:
        patch.setattr(wellposed.gpytorch, "conjugate_gradients", None)  # calling it would be an error
        a = solve(operator, y, rtol=1e-14)
    assert float((A @ a - y).norm()) <= 2e-14 * float(y.norm())
    singular = kernel.operator(X[[0, 0, 1]]).detach().add_diagonal(torch.tensor(-1e-9, dtype=F64))
    assert factored_solve(singular.to_dense(), y[:3], rtol=1e-10) is None  # it has no factor
    with pytest.raises(NotConverged, match="max_steps=1000"):
        solve(singular, y[:3])
    assert factored_solve(A, y, rtol=1e-30) is None  # nothing is that accurate


def test_solves_at_the_edges() -> None:
    kernel, X = KERNELS["wide"](), samples(6)
    y = torch.sin(X[:, 0])
    for n in (1, 6):  # without noise the preconditioner of the package divides by 0
        operator = kernel.operator(X[:n]).detach().add_diagonal(torch.tensor(0.0, dtype=F64))
        for size in (0, 8 * n * n):
            a = solve(operator, y[:n], dense=size)
            torch.testing.assert_close(dense("wide", kernel, X[:n]) @ a, y[:n], rtol=0.0, atol=1e-9)
    assert torch.equal(solve(operator, 0 * y), 0 * y)
    with pytest.raises(InvalidArgument, match=r"solve: y must be finite, .6, .... and torch.float64; got .*NaN"):
        solve(operator, y.log())
    for rtol, kind in ((1e-16, F64), (1e-10, torch.float32), (0.0, F64), (float("nan"), F64), (1.0, F64)):
        with pytest.raises(InvalidArgument, match="solve: rtol must be from .*e-.* to below 1, got "):
            solve(operator.to(kind), y.to(kind), rtol=rtol)
    for wrong in (y[:4], y.float()):
        with pytest.raises(InvalidArgument, match=r"solve: y must be finite, .6, .... and torch.float64; got "):
            solve(operator, wrong)
    with pytest.raises(InvalidArgument, match=r"solve: the operator must be a square .n, n., got .3, 6."):
        solve(kernel.operator(X[:3], X), y[:3])
    A = dense("wide", kernel, X) + torch.eye(6, dtype=F64)
    for size in (0, 8 * 6 * 6):  # a matrix is an operator too
        torch.testing.assert_close(A @ solve(A, y, dense=size), y, rtol=0.0, atol=1e-9)


def test_a_weight_variance_is_set_in_the_precision_of_the_kernel() -> None:
    kernel = WideKernel(0.1).double()
    assert 1e-10 < abs(float(kernel.weight_variance.detach()) - 0.1) < 1e-7  # rounded in single precision, as the docs say
    kernel.weight_variance = 0.3
    assert float(kernel.weight_variance.detach()) == pytest.approx(0.3, rel=1e-14)
    with pytest.raises(InvalidArgument, match=r"must be a number in .0, 1."):
        kernel.weight_variance = 1.5


@pytest.mark.parametrize("trained", ["first", "second", "both"])
@pytest.mark.parametrize("copied", [True, False], ids=["copy", "view"])
def test_equal_inputs_are_two_variables(trained: str, copied: bool) -> None:
    """Inducing points that start at the data; against autograd through the dense kernel of inputs that are not equal."""
    kernel, X, weights = WideKernel(0.2, readout_variance=0.0).double(), samples(6, 3), samples(6, 6, seed=1)
    near = X + 1e-6 * samples(6, 3, seed=2)  # the gradient of this kernel has no jump there

    def gradients(X: Tensor, X2: Tensor, matrix: Any) -> list[Tensor]:
        pair = [X.requires_grad_(trained != "second"), X2.requires_grad_(trained != "first")]
        return list(torch.autograd.grad((matrix(*pair) * weights).sum(), [x for x in pair if x.requires_grad]))

    s = kernel.weight_variance.detach()
    expected = gradients(X.clone(), near, lambda A, B: deq_ntk(A, B, weight_variance=s, readout_variance=0.0))
    A = X.clone()
    B = A.clone() if copied else A.detach()
    for matrix in (lambda A, B: kernel(A, B).to_dense(), lambda A, B: kernel.operator(A, B).to_dense()):
        for found, wanted in zip(gradients(A, B, matrix), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4 * float(wanted.abs().max()))


def test_layers_around_the_equilibrium() -> None:
    X, options = samples(6), {"before": [WideLayer(torch.tanh, 0.5)], "after": [WideLayer()]}
    kernel = WideKernel(0.2, **options).double()
    assert not any(parameter.requires_grad for parameter in kernel.parameters())
    expected = deq_ntk(X, weight_variance=float(kernel.weight_variance), **options)
    torch.testing.assert_close(kernel(X).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "network"])
def test_two_thousand_samples_agree_with_cholesky(name: str) -> None:
    """Means and variances to 1e-6, by conjugate gradients, without the matrix; and the log-determinant."""
    kernel, X, X_new = KERNELS[name](), samples(2000), samples(9, seed=1)
    y = torch.sin(2 * X[:, 0])
    K, k, d = dense(name, kernel, X), dense(name, kernel, X_new, X), dense(name, kernel, X_new).diagonal()
    mean, variance = cholesky(K, k, d, y)
    with torch.no_grad():
        operator = kernel.operator(X).add_diagonal(torch.tensor(0.05, dtype=F64))
        cross = kernel.operator(X_new, X)
        a = solve(operator, torch.cat([y[:, None], cross.to_dense().mT], dim=1), dense=0)
        torch.testing.assert_close(cross @ a[:, 0], mean, rtol=0.0, atol=1e-6)
        torch.testing.assert_close(d - (cross.to_dense() * a[:, 1:].mT).sum(1), variance, rtol=0.0, atol=1e-6)
        with linear_operator.settings.num_trace_samples(50):
            logdet = operator.logdet()
    expected = torch.logdet(K + 0.05 * torch.eye(2000, dtype=F64))
    torch.testing.assert_close(logdet, expected, rtol=0.02, atol=0.0)  # stochastic: 50 probe vectors


def test_features_are_solved_once_and_again_after_a_step() -> None:
    model, X = network(), samples(6)
    kernel, calls = NetworkKernel(model), []
    original = model.tangent_features
    model.tangent_features = lambda X: calls.append(len(X)) or original(X)
    before = kernel(X).to_dense()
    kernel(X).to_dense(), kernel(X[:3].clone(), X).to_dense()
    assert calls == [6, 3]
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    after = kernel(X).to_dense()
    assert calls == [6, 3, 6] and not torch.allclose(before, after)
    next(model.parameters()).data.mul_(1.1)  # leaves no trace but the values
    torch.testing.assert_close(kernel(X).to_dense(), tangent_kernel(model, X), rtol=1e-12, atol=1e-12)
    assert not list(kernel.parameters())  # the network is not trained by the Gaussian process
    assert kernel.dtype == F64


class Scaled(torch.nn.Module):
    """A kernel that depends on the mode, on a number and on a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.activation = torch.nn.Linear(5, 1).double(), 1.0, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))[:, 0] * self.scale * (2.0 if self.training else 1.0)


def test_features_are_new_when_the_network_changed_in_what_is_not_a_tensor() -> None:
    model, X = Scaled(), samples(6)
    kernel, deq = NetworkKernel(model), network()
    of_deq = NetworkKernel(deq)
    changes: list[Any] = [
        (kernel, model, model.eval),
        (kernel, model, lambda: setattr(model, "scale", 3.0)),
        (kernel, model, lambda: setattr(model, "activation", torch.sin)),
        (kernel, model, lambda: model.linear.bias.requires_grad_(False)),
        (of_deq, deq, lambda: deq.U.requires_grad_(False)),
        (of_deq, deq, lambda: setattr(deq, "activation", wp.nn.Tanh())),
    ]
    for asked, changed, change in changes:
        before = asked(X).to_dense()
        change()
        after, expected = asked(X).to_dense(), tangent_kernel(changed, X)
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
        assert not torch.allclose(before, after)


@pytest.mark.parametrize("name", ["network", "module"])
def test_a_network_kernel_has_no_gradient_by_its_inputs(name: str) -> None:
    gp, likelihood, X, _, X_new = gaussian_process(KERNELS[name](), 20)
    asked = X.clone().requires_grad_()
    for call in (
        lambda: gp.kernel(asked).to_dense(),
        lambda: gp.kernel(X, asked).to_dense(),
        lambda: gp.kernel.operator(asked),
    ):
        with pytest.raises(InvalidArgument, match=r"not differentiable by its inputs, and X requires a gradient. Pass X.det"):
            call()
    gp.eval(), likelihood.eval()
    with pytest.raises(InvalidArgument, match="not differentiable by its inputs"):
        gp(X_new.requires_grad_())  # as an acquisition function is maximised
    with torch.no_grad():
        torch.testing.assert_close(gp.kernel(asked).to_dense(), gp.kernel(X).to_dense())
        assert gp(X_new).mean.shape == (9,)


class Holding(torch.nn.Module):
    """A kernel that depends on what torch does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._private = torch.nn.Linear(5, 1).double(), 1.0
        self.list, self.dict, self.plain = [1.0, [1.0]], {"a": 1.0}, torch.ones(1, dtype=F64)
        self.array, self.hidden = np.ones(1), [torch.nn.Linear(1, 1, bias=False).double()]
        self.itself = [self]

    def forward(self, x: Tensor) -> Tensor:
        scale = self.list[1][0] * self.dict["a"] * self._private * self.plain[0] * float(self.array[0])  # type: ignore[index]
        return self.linear(x)[:, 0] * scale * self.hidden[0].weight.detach()[0, 0]


_CHANGES: dict[str, Any] = {
    "list": lambda model: model.list[1].__setitem__(0, 3.0),
    "dict": lambda model: model.dict.update(a=3.0),
    "private": lambda model: setattr(model, "_private", 3.0),
    "plain tensor": lambda model: model.plain.mul_(3.0),
    "array": lambda model: model.array.__imul__(3.0),
    "module in a list": lambda model: model.hidden[0].weight.data.mul_(3.0),
    "hook": lambda model: model.register_forward_hook(lambda module, args, output: 3.0 * output),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_features_are_new_when_the_network_changed_in_what_torch_does_not_list(what: str) -> None:
    model, X = Holding(), samples(6)
    kernel = NetworkKernel(model)
    before = kernel(X).to_dense()
    _CHANGES[what](model)
    after, expected = kernel(X).to_dense(), tangent_kernel(model, X)
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("name", ["network", "monotone", "module", "holding", "layer"])
def test_features_of_an_unchanged_network_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = wp.nn.DenseCell(5, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
    layer = torch.nn.Sequential(wp.EquilibriumLayer(cell), torch.nn.Linear(6, 1).double())
    kernel = KERNELS[name]() if name in KERNELS else NetworkKernel(Holding() if name == "holding" else layer)
    calls, original = [], wellposed.gpytorch.network_rows
    monkeypatch.setattr(wellposed.gpytorch, "network_rows", lambda *args: calls.append(1) or original(*args))
    for _ in range(3):
        kernel(samples(6)).to_dense(), kernel(samples(4, seed=1), samples(6)).to_dense()
    assert len(calls) == 2


def test_other_activations_keep_their_weight_variance() -> None:
    kernel, X = WideKernel(0.2, activation=torch.tanh).double(), samples(6)
    assert not any(parameter.requires_grad for parameter in kernel.parameters())
    expected = deq_ntk(X, weight_variance=float(kernel.weight_variance), activation=torch.tanh)
    torch.testing.assert_close(kernel(X) @ X, expected @ X, rtol=1e-12, atol=1e-12)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgument, match="WideKernel: 'weight_variance' must be a number in .0, 1., got 1.5"):
        WideKernel(1.5)
    with pytest.raises(InvalidArgument, match="above 0 where training starts, got 0"):
        WideKernel(0.0)
    with pytest.raises(InvalidArgument, match=r"must be a number in .0, 1., got tensor.1."):
        WideKernel(1 - 1e-12)  # is 1 in single precision, that of the parameter
    with pytest.raises(InvalidArgument, match=r"X must be .n, d., one set of samples as rows; got shape .2, 6, 5."):
        WideKernel(0.1).double()(samples(6).expand(2, 6, 5)).to_dense()
    with pytest.raises(InvalidArgument, match="by_parameter cannot be given"):
        WideKernel(0.1, by_parameter=True)
    with pytest.raises(TypeError, match="widht"):
        WideKernel(0.1, widht=10)
    with pytest.raises(InvalidArgument, match="must have one output, got 2"):
        NetworkKernel(torch.nn.Linear(5, 2).double()).operator(samples(3))
