"""The policy of networks that contract: what happens, when, and at whose line."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch

import wellposed as wp
from equilibria import F64, normal
from networks import CONTRACTIONS, FAMILIES, inputs, tensors_of
from wellposed.nn.families import _contraction

every_contraction = pytest.mark.parametrize("name", CONTRACTIONS)
METHODS = ["__call__", "equilibrium", "solve", "linearise", "tangent_features", "least_preactivation"]


def recurrent_parameter(network):
    return network.W if isinstance(network, wp.GaussianDEQ) else network.A


def true_norm(name, network):
    return float(torch.linalg.matrix_norm(FAMILIES[name].recurrent(tensors_of(network)), 2))


def expanding(name, **options):
    """A network with |R| = 3."""
    network = FAMILIES[name](**{"on_failure": "ignore", **options})
    recurrent_parameter(network).data.mul_(3 / true_norm(name, network))
    return network


@every_contraction
def test_the_bound_is_the_norm_from_above(name):
    network = FAMILIES[name](width=30)
    bound, norm = network.contraction_upper(), true_norm(name, network)
    assert norm * (1 - 1e-14) <= bound <= norm * (1 + 1e-11)


@every_contraction
def test_the_bound_holds_along_a_random_walk(name):
    network, X = FAMILIES[name](), inputs(2)
    for k in range(30):
        with torch.no_grad():
            parameter = recurrent_parameter(network)
            parameter.add_(normal(*parameter.shape, seed=k, scale=0.02))
        if true_norm(name, network) >= 1:
            with pytest.raises(wp.errors.IllPosed):
                network(X)
            break
        network(X)
        assert network.contraction_upper() >= true_norm(name, network) * (1 - 1e-14)


@every_contraction
@pytest.mark.parametrize("method", METHODS)
def test_raise(name, method):
    network = expanding(name)
    with pytest.raises(wp.errors.IllPosed, match=r"at most 3(\.0+\d*)?, not below 1.*on_ill_posed='warn'"):
        getattr(network, method)(inputs())


@every_contraction
@pytest.mark.parametrize("method", METHODS)
def test_a_warning_points_at_the_line_of_the_caller(name, method):
    network, X = expanding(name, on_ill_posed="warn"), inputs()
    call = getattr(network, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        call(X)
    mine = [w for w in caught if w.category is wp.errors.IllPosedWarning]
    assert len(mine) == 1 and mine[0].filename == __file__ and mine[0].lineno == line


@every_contraction
def test_ignore_says_and_computes_nothing(name, monkeypatch):
    network = expanding(name, on_ill_posed="ignore")
    monkeypatch.setattr(_contraction, "spectral_norm_upper", None)  # calling it would fail
    network(inputs())
    network.linearise(inputs())


@every_contraction
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite(name, bad):
    network, X = FAMILIES[name](on_failure="ignore"), inputs()
    recurrent_parameter(network).data[0, 0] = bad
    with pytest.raises(wp.errors.IllPosed, match="NaN or infinite entries"):
        network(X)
    network.on_ill_posed = "warn"
    with pytest.warns(wp.errors.IllPosedWarning, match="NaN or infinite entries"):
        network(X)
    with pytest.raises(wp.errors.InvalidArgument, match="must be finite"):
        network.contraction_upper()


@every_contraction
def test_writes_through_data_are_noticed_and_can_be_undone(name):
    network, X = FAMILIES[name](), inputs()
    y, parameter = network(X), recurrent_parameter(network)
    keep = parameter.data.clone()
    parameter.data.mul_(50)
    with pytest.raises(wp.errors.IllPosed):
        network(X)
    parameter.data.copy_(keep)
    assert torch.equal(network(X), y)
    parameter.data.view(-1)[0] += 50  # one entry, behind the back of every version counter
    with pytest.raises(wp.errors.IllPosed):
        network(X)


@every_contraction
def test_decomposed_only_when_needed(name, monkeypatch):
    calls = []

    def counted(V):
        calls.append(1)
        return wp.linalg.spectral_norm_upper(V)

    monkeypatch.setattr(_contraction, "spectral_norm_upper", counted)
    network, X = FAMILIES[name](), inputs()
    parameter = recurrent_parameter(network)
    parameter.data.mul_(0.5 / true_norm(name, network))
    for _ in range(5):
        network(X).sum().backward()
        with torch.no_grad():
            parameter.sub_(1e-3 * parameter.grad / parameter.grad.norm())
    network.solve(X), network.linearise(X)
    assert len(calls) == 1


def test_unknown_policy():
    with pytest.raises(wp.errors.InvalidArgument, match="'raise', 'warn' or 'ignore'; got 'wran'. Did you mean 'warn'"):
        wp.GaussianDEQ(3, 5, on_ill_posed="wran")


def test_training_stops_before_the_proof_is_lost():
    """Gradient ascent on |W|, until the network says so: never a step later."""
    network, X = wp.GaussianDEQ(3, 10, generator=torch.Generator().manual_seed(0), dtype=F64), inputs()
    with pytest.raises(wp.errors.IllPosed):
        for _ in range(200):
            network(X)
            assert true_norm("gaussian", network) < 1
            network.W.data.mul_(1.01)
    assert true_norm("gaussian", network) >= 1 - 1e-11
