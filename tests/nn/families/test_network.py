"""What all theory networks share: each is compared with its definition, written a second time in `tests/networks.py`."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import wellposed as wp
from equilibria import F64, normal
from networks import (
    FAMILIES,
    Family,
    dense_adjoint,
    dense_equilibrium,
    dense_jacobian,
    generic_predictions,
    inputs,
    kernels,
    parameters_of,
    tensors_of,
)

#: With a diagonal A, pre-activations are exactly 0 wherever phi is: there is no derivative there, only relu'(0) = 0.
SMOOTH = {name: family for name, family in FAMILIES.items() if name != "diagonal"}
every_smooth_family = pytest.mark.parametrize("family", SMOOTH.values(), ids=SMOOTH.keys())
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
a_family = st.sampled_from(list(FAMILIES.values()))


def close(a, b, tolerance=1e-10):
    """Absolute, where the reference is of size 1, and relative otherwise."""
    a, b = a.detach(), b.detach()
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max()) if b.numel() else 1.0))


def smooth(family: Family, network: wp.nn.AbstractNetwork, X: torch.Tensor) -> bool:
    """Whether no pre-activation is so near 0 that rounding could flip its mask; exact zeros, at a diagonal A, are stable."""
    tensors = tensors_of(network)
    Z = dense_equilibrium(family, tensors, X)
    pre = Z @ family.recurrent(tensors).T + family.injection(tensors, X)
    return bool(((pre.abs() > 1e-6) | (pre == 0)).all())


# --- values -----------------------------------------------------------------------------------------------------------


@every_family
def test_predictions_are_those_of_a_dense_loop(family):
    network, X = family(width=12), inputs(6)
    tensors = tensors_of(network)
    Z = dense_equilibrium(family, tensors, X)
    close(family.map(tensors, Z, X), Z, 1e-13)
    y = network(X)
    assert y.shape == (6,) and y.dtype == F64
    close(y, family.readout(tensors, Z, X))
    close(network.equilibrium(X), Z)
    assert network.equilibrium(X).shape == (6, 12)


@settings(deadline=None, max_examples=25)
@given(family=a_family, d=st.integers(1, 5), m=st.integers(1, 12), n=st.integers(0, 6), seed=st.integers(0, 10**6))
def test_values_and_adjoints_for_any_size(family, d, m, n, seed):
    network, X = family.any_size(d, m, seed=seed), inputs(n, d, seed=seed + 1)
    tensors = tensors_of(network)
    Z = dense_equilibrium(family, tensors, X)
    at = network.linearise(X)
    close(at.value, Z)
    close(at.image, Z)
    close(network(X), family.readout(tensors, Z, X))
    assume(n == 0 or smooth(family, network, X))
    close(at.adjoint, dense_adjoint(family, tensors, Z))


@every_family
def test_solve_tells_how_it_went(family):
    network, X = family(), inputs()
    solution = network.solve(X, record=True)
    assert bool(solution.converged.all()) and solution.history is not None
    assert not solution.value.requires_grad
    close(solution.value, dense_equilibrium(family, tensors_of(network), X))
    assert network.layer.last_solution is solution


@every_family
def test_a_start_changes_the_steps_and_not_the_answer(family):
    network, X = family(width=20), inputs()
    first = network.linearise(X)
    again = network.linearise(X, z0=first.value, p0=first.adjoint)
    close(again.value, first.value, 1e-11)
    close(again.adjoint, first.adjoint, 1e-11)
    assert int(again.adjoint_solution.num_steps.max()) <= int(first.adjoint_solution.num_steps.max())
    assert int(network.solve(X, first.value).num_steps.max()) <= 2
    close(network.equilibrium(X, first.value + 0.1), first.value)


@every_family
def test_a_sample_ignores_its_neighbours(family):
    network, X = family(width=10), inputs(8)
    y, at = network(X), network.linearise(X)
    for i in (0, 5):
        close(network(X[i : i + 1]), y[i : i + 1], 1e-12)
        close(network.linearise(X[i : i + 1]).adjoint, at.adjoint[i : i + 1], 1e-11)


@every_family
def test_least_preactivation(family):
    network, X = family(), inputs()
    tensors = tensors_of(network)
    Z = dense_equilibrium(family, tensors, X)
    pre = Z @ family.recurrent(tensors).T + family.injection(tensors, X)
    close(network.least_preactivation(X), pre.abs().min(dim=1).values)


# --- first derivatives, five ways -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(family=a_family, d=st.integers(1, 4), m=st.integers(2, 10), n=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_closed_form_backward_and_generic_implicit_differentiation_agree(family, d, m, n, seed):
    network, X = family.any_size(d, m, seed=seed), inputs(n, d, seed=seed + 1)
    assume(smooth(family, network, X))
    r = normal(n, seed=seed + 2)
    closed = network.gradients(X, network.linearise(X), r)
    names = [name for name, _ in network.named_parameters()]
    backward = dict(zip(names, torch.autograd.grad(network(X) @ r, list(network.parameters())), strict=True))
    leaves = {name: t.requires_grad_(name in names) for name, t in tensors_of(network).items()}
    generic = torch.autograd.grad(generic_predictions(family, leaves, X) @ r, [leaves[name] for name in names])
    for name, reference in zip(names, generic, strict=True):
        close(closed[name], reference)
        close(backward[name], reference)


@every_smooth_family
def test_gradients_against_dense_jacobians_and_difference_quotients(family):
    network, X, r = family(seed=2), inputs(), normal(5, seed=4)
    assert smooth(family, network, X)
    closed = network.gradients(X, network.linearise(X), r)
    tensors = tensors_of(network)
    for name, gradient in closed.items():
        close(gradient.flatten(), r @ dense_jacobian(family, tensors, X, name))
        direction, h = normal(*gradient.shape, seed=5), 1e-6
        values = []
        for sign in (1, -1):
            moved = {**tensors, name: tensors[name] + sign * h * direction}
            values.append(family.readout(moved, dense_equilibrium(family, moved, X), X) @ r)
        assert float((gradient * direction).sum()) == pytest.approx(float(values[0] - values[1]) / (2 * h), rel=1e-6, abs=1e-8)


@every_family
def test_the_residual_of_a_loss_gives_its_gradient(family):
    network, X, y = family(), inputs(), normal(5, seed=3)
    prediction = network(X)
    loss = (prediction - y).square().sum() / 2
    loss.backward()
    closed = network.gradients(X, network.linearise(X), prediction - y)  # a residual with a graph will do
    for name, parameter in network.named_parameters():
        close(closed[name], parameter.grad)
        assert not closed[name].requires_grad


@every_family
def test_gradient_of_the_input(family):
    network, X = family(seed=2), inputs().requires_grad_()
    (ours,) = torch.autograd.grad(network(X).sum(), X)
    (theirs,) = torch.autograd.grad(generic_predictions(family, tensors_of(network), X).sum(), X)
    close(ours, theirs)


@every_smooth_family
def test_gradcheck_and_gradgradcheck(family):
    network, X = family(2, 4, seed=3), inputs(2, 2).requires_grad_()
    assert smooth(family, network, X.detach())
    names = [name for name, _ in network.named_parameters()]

    def f(X, *values):
        return torch.func.functional_call(network, dict(zip(names, values, strict=True)), (X,))

    leaves = (X, *(parameter.detach().clone().requires_grad_() for parameter in network.parameters()))
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@every_family
def test_several_forwards_before_one_backward(family):
    network, X = family(), inputs(6)
    whole = torch.autograd.grad(network(X).sin().sum(), list(network.parameters()))
    first, second = network(X[:2]), network(X[2:])
    network.solve(X[:1])
    parts = torch.autograd.grad(first.sin().sum() + second.sin().sum(), list(network.parameters()))
    for a, b in zip(parts, whole, strict=True):
        close(a, b)


@every_family
def test_frozen_parameters(family):
    network, X, r = family(), inputs(), normal(5, seed=3)
    everything = network.gradients(X, network.linearise(X), r)
    terms = set(network.tangent_features(X).terms)
    assert terms == set(everything) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        rest = {k: v for k, v in everything.items() if k != name}
        closed = network.gradients(X, network.linearise(X), r)
        assert closed.keys() == rest.keys() == network.tangent_features(X).terms.keys()
        for key, value in rest.items():
            close(closed[key], value)
        y = network(X)
        assert y.requires_grad == bool(rest)
        if rest:
            (y @ r).backward()
            assert parameter.grad is None
            for key, value in network.named_parameters():
                if key in rest:
                    close(value.grad, rest[key])
            network.zero_grad()
        parameter.requires_grad_(True)
    network.requires_grad_(False)
    assert network.gradients(X, network.linearise(X), r) == {}
    assert not network(X).requires_grad


@every_family
def test_gradients_refuses_what_does_not_belong_together(family):
    network, X = family(), inputs()
    at = network.linearise(X)
    with pytest.raises(wp.errors.InvalidArgument, match=r"shape \(5,\).*got r of shape \(5, 1\)"):
        network.gradients(X, at, torch.ones(5, 1, dtype=F64))
    with pytest.raises(wp.errors.InvalidArgument, match="linearisation of 5 samples"):
        network.gradients(X[:4], at, torch.ones(4, dtype=F64))
    with pytest.raises(wp.errors.InvalidArgument, match="got r of shape list"):
        network.gradients(X, at, [1.0] * 5)


# --- tangent kernels --------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("seed", [0, 1])
def test_kernel_parts_are_grams_of_dense_jacobians(family, seed):
    network, X, X2 = family(seed=seed), inputs(4, seed=2), inputs(3, seed=3)
    tensors = tensors_of(network)
    square = kernels(network.tangent_features(X), network.tangent_features(X))
    cross = kernels(network.tangent_features(X), network.tangent_features(X2))
    assert list(square) == [name for name, _ in network.named_parameters()]
    for name in square:
        J, J2 = dense_jacobian(family, tensors, X, name), dense_jacobian(family, tensors, X2, name)
        close(square[name], J @ J.T, 1e-9)
        close(cross[name], J @ J2.T, 1e-9)


@settings(deadline=None, max_examples=20)
@given(family=a_family, d=st.integers(1, 4), m=st.integers(2, 8), n=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_kernel_is_the_gram_of_autograd_jacobians(family, d, m, n, seed):
    network, X = family.any_size(d, m, seed=seed), inputs(n, d, seed=seed + 1)
    assume(smooth(family, network, X))
    parts = kernels(network.tangent_features(X), network.tangent_features(X))
    parameters = list(network.parameters())
    rows = [torch.autograd.grad(y, parameters, retain_graph=True) for y in network(X)]
    for k, name in enumerate(parts):
        J = torch.stack([row[k].flatten() for row in rows])
        close(parts[name], J @ J.T, 1e-9)
        assert float(torch.linalg.eigvalsh(parts[name])[0]) >= -1e-9 * max(1.0, float(parts[name].abs().max()))


# --- torch.func -------------------------------------------------------------------------------------------------------

FUNC = [name for name in FAMILIES if name != "monotone"]


@pytest.mark.parametrize("name", FUNC)
def test_functional_call_grad_and_jacrev(name):
    family = FAMILIES[name]
    network, X = family(seed=2), inputs()
    parameters, tensors = parameters_of(network), tensors_of(network)

    def predict(parameters):
        return torch.func.functional_call(network, parameters, (X,))

    half = {key: value * 0.5 for key, value in parameters.items()}
    moved = {**tensors, **half}
    close(predict(half), family.readout(moved, dense_equilibrium(family, moved, X), X))
    gradient = torch.func.grad(lambda p: predict(p).sum())(parameters)
    jacobian = torch.func.jacrev(predict)(parameters)
    for key in parameters:
        J = dense_jacobian(family, tensors, X, key)
        close(gradient[key].flatten(), J.sum(0), 1e-9)
        close(jacobian[key].flatten(1), J, 1e-9)
    close(network(X), family.readout(tensors, dense_equilibrium(family, tensors, X), X))  # all is back in place


def test_a_monotone_network_under_transforms_is_exact_or_says_that_it_is_not():
    """Plain iteration is all that transforms allow; where the network contracts that is enough."""
    family = FAMILIES["monotone"]
    network, X = family(seed=2), inputs()
    with torch.no_grad():
        network.A.mul_(0.3), network.B.mul_(0.3)
    parameters, tensors = parameters_of(network), tensors_of(network)
    assert float(torch.linalg.matrix_norm(family.recurrent(tensors), 2)) < 1
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(network, p, (X,)))(parameters)
    for key in parameters:
        close(jacobian[key].flatten(1), dense_jacobian(family, tensors, X, key), 1e-9)
    with torch.no_grad():
        network.B.mul_(40)
    with pytest.raises(wp.NotConverged, match="Only plain iteration works under transforms"):
        torch.func.grad(lambda x: network(x).sum())(X)


@every_family
def test_linearise_and_solve_refuse_transforms(family):
    network, X = family(), inputs()
    with pytest.raises(wp.errors.WellposedError, match="linearise needs concrete values"):
        torch.func.grad(lambda X: network.linearise(X).value.sum())(X)
    with pytest.raises(wp.errors.WellposedError, match="solve needs concrete values"):
        torch.func.grad(lambda X: network.solve(X).value.sum())(X)


# --- precision --------------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"])
def test_lower_precision(family, dtype, tolerance):
    network, X = family(width=8, dtype=dtype), inputs().to(dtype)
    exact = {name: t.double() for name, t in tensors_of(network).items()}
    Z = dense_equilibrium(family, exact, X.double())
    y = network(X)
    assert y.dtype == network.equilibrium(X).dtype == dtype
    close(y.double(), family.readout(exact, Z, X.double()), tolerance)
    at = network.linearise(X)
    assert at.value.dtype == at.adjoint.dtype == torch.float32  # what a solve works in
    r = normal(5, seed=3).to(dtype)
    closed = network.gradients(X, at, r)
    (y @ r).backward()
    for name, parameter in network.named_parameters():
        reference = r.double() @ dense_jacobian(family, exact, X.double(), name)
        assert closed[name].dtype == parameter.grad.dtype == dtype
        close(closed[name].double().flatten(), reference, tolerance)
        close(parameter.grad.double().flatten(), reference, tolerance)
    features = network.tangent_features(X)
    assert all(feature.dtype == torch.float32 for feature in features.features.values())
    assert network.least_preactivation(X).dtype == torch.float32


@every_family
def test_autocast_changes_nothing(family):
    network, X, r = family(dtype=torch.float32), inputs().float(), normal(5, seed=3).float()

    def everything():
        at = network.linearise(X)
        features = network.tangent_features(X).features
        closed = network.gradients(X, at, r)
        return [network(X), at.value, at.adjoint, *features.values(), *closed.values(), network.least_preactivation(X)]

    plain = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = everything()
    for a, b in zip(mixed, plain, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@every_family
def test_moving_to_another_dtype(family):
    network, X = family(dtype=torch.float32), inputs()
    y = network(X.float())
    network.double()
    close(network(X), y.double(), 1e-5)
    assert network(X).dtype == F64


# --- initialization, storage ------------------------------------------------------------------------------------------


@every_family
def test_the_generator_decides_the_draw(family):
    one, two, other = family(seed=1), family(seed=1), family(seed=2)
    for name, tensor in tensors_of(one).items():
        assert torch.equal(tensor, tensors_of(two)[name])
        if name not in ("u", "v", "b"):  # signs of few units may agree
            assert not torch.equal(tensor, tensors_of(other)[name])
    before = torch.random.get_rng_state()
    family(seed=1)
    assert torch.equal(before, torch.random.get_rng_state())  # and the global one is left alone


@every_family
def test_dtype_and_device_of_the_parameters(family):
    network = family.make(3, 7, dtype=torch.float32, device="cpu")
    for tensor in tensors_of(network).values():
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    assert all(t.dtype == torch.get_default_dtype() for t in tensors_of(family.make(3, 7)).values())


@every_family
def test_state_dict_round_trip(family):
    one, two, X = family(seed=1), family(seed=2), inputs()
    assert not torch.allclose(one(X), two(X))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(one(X), two(X))
    assert set(one.state_dict()) == set(tensors_of(one))  # the letters, and nothing else


@every_family
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))], ids=["copy", "pickle"])
def test_a_copy_is_a_network_of_its_own(family, clone):
    network, X = family(), inputs()
    y = network(X).detach()
    network.linearise(X)
    other = clone(network)
    assert torch.equal(other(X), y)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert torch.equal(network(X), y)
    assert not torch.allclose(other(X), y)
    other(X).sum().backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


@every_family
def test_its_name_shows_its_sizes(family):
    text = repr(family(3, 7))
    assert text.startswith(type(family(3, 7)).__name__ + "(") and "3, 7" in text


# --- what is refused, and odd inputs ----------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("method", ["__call__", "equilibrium", "solve", "linearise", "tangent_features", "least_preactivation"])
def test_bad_inputs_are_named(family, method):
    network, X = family(), inputs()
    call, name = getattr(network, method), type(network).__name__
    with pytest.raises(wp.errors.InvalidArgument, match=rf"{name} expects X of shape \(n, 3\); got \(5, 2\)"):
        call(X[:, :2])
    with pytest.raises(wp.errors.InvalidArgument, match=r"got \(3,\)"):
        call(X[0])
    with pytest.raises(wp.errors.InvalidType, match=r"float64 parameters and got X of torch.float32.*X.to\(torch.float64\)"):
        call(X.float())
    with pytest.raises(wp.errors.InvalidType, match="got list"):
        call([[1.0, 2.0, 3.0]])


@every_family
def test_bad_sizes_and_options_are_named(family):
    with pytest.raises(wp.errors.InvalidArgument, match="'in_features' parameter of .* at least 1. Got 0"):
        family(0, 5)
    with pytest.raises(wp.errors.InvalidArgument, match="'width' parameter of .* at least 1. Got 2.5"):
        family(3, 2.5)
    with pytest.raises(TypeError, match="not_an_option"):
        family(3, 5, not_an_option=1)
    with pytest.raises(wp.errors.InvalidArgument, match="on_failure must be 'raise', 'warn' or 'ignore'; got 'rise'"):
        family(3, 5, on_failure="rise")
    with pytest.raises(wp.errors.InvalidArgument, match="z0 must have the shape of the state"):
        family(3, 5).equilibrium(inputs(), torch.zeros(5, 4, dtype=F64))


@every_family
def test_an_empty_batch(family):
    network, X = family(), inputs()[:0]
    y = network(X)
    assert y.shape == (0,) and network.equilibrium(X).shape == network.linearise(X).adjoint.shape == (0, 7)
    assert len(network.solve(X).status) == 0 and network.least_preactivation(X).shape == (0,)
    y.sum().backward()
    closed = network.gradients(X, network.linearise(X), torch.zeros(0, dtype=F64))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)) and torch.equal(
            closed[name], torch.zeros_like(parameter)
        )


@every_family
def test_a_nan_in_one_sample_is_reported_and_stays_there(family):
    network, X = family(on_failure="ignore"), inputs()
    y = network(X).detach()
    X[2, 1] = torch.nan
    keep = [0, 1, 3, 4]
    seen = network(X)
    close(seen[keep], y[keep], 1e-12)
    assert bool(seen[2].isnan())  # the start, 0, would pass for a prediction
    solution = network.layer.last_solution
    assert solution.status[2] is wp.Status.NOT_FINITE and bool(solution.converged[keep].all())
    network.layer.on_failure = "raise"
    with pytest.raises(wp.NotConverged, match="index 2, NOT_FINITE"):
        network(X)


@every_family
def test_a_parameter_changed_between_forward_and_backward_is_noticed_or_harmless(family):
    network, X = family(), inputs()
    expected = torch.autograd.grad(network(X).sum(), list(network.parameters()))
    y = network(X).sum()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01)
    try:
        found = torch.autograd.grad(y, list(network.parameters()))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        for a, b in zip(found, expected, strict=True):
            close(a, b)


@pytest.mark.parametrize("gradient", [wp.PhantomGradient(2), wp.UnrolledGradient(10)], ids=repr)
def test_an_inexact_gradient_has_no_linearisation(gradient):
    with pytest.raises(wp.errors.InvalidType, match="needs ImplicitGradient"):
        wp.GaussianDEQ(3, 5, gradient=gradient).linearise(torch.ones(2, 3))
    small = {"weight_variance": 0.005, "generator": torch.Generator().manual_seed(0)}  # at width 5 others may be ill-posed
    assert wp.GaussianDEQ(3, 5, gradient=gradient, on_failure="ignore", **small)(torch.ones(2, 3)).requires_grad


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    [("skip", "aot_eager")]
    + [pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in FAMILIES if name != "skip"]
    + [pytest.param(name, "inductor", marks=pytest.mark.slow) for name in FAMILIES],
)
def test_compiled(name, backend):
    torch._dynamo.reset()
    network, X = FAMILIES[name](), inputs()
    y = network(X)
    expected = torch.autograd.grad(y.sin().sum(), list(network.parameters()))
    compiled = torch.compile(network, backend=backend)
    z = compiled(X)
    close(z, y)
    for a, b in zip(torch.autograd.grad(z.sin().sum(), list(network.parameters())), expected, strict=True):
        close(a, b)
    torch._dynamo.reset()
