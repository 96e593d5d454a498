"""What every network of the theory must do."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed.certify import certify
from wellposed.descent import descend
from wellposed.errors import WellposedError
from wellposed.kernel import tangent_kernel
from wellposed.nn.families._declared import contradiction
from wellposed.testing._checks import require, same
from wellposed.testing._dense import implicit_jacobian, polished
from wellposed.testing._problem import gaussian


class FamilyConformance(abc.ABC):
    """Tests that a network of the theory inherits: define `network` and `definition`.

    `definition` is the dense twin: the map and the read-out, written with the letters of the paper.

        >>> import torch, wellposed as wp
        >>> from wellposed.testing import FamilyConformance
        >>> class TestGaussianDEQ(FamilyConformance):
        ...     def network(self, in_features, width, **options):
        ...         return wp.GaussianDEQ(in_features, width, **options)
        ...     def definition(self, t, X, Z):
        ...         return torch.relu(Z @ t["W"].T + X @ t["U"].T), Z @ t["a"]
        >>> TestGaussianDEQ().test_predictions_are_the_definition()

    Attributes:
        in_features, width, samples: Of the problem. Small: the reference forms dense Jacobians of
            the batch.
        rtol: How closely two computations in float64 must agree, relative to the largest entry.
    """

    in_features: ClassVar[int] = 3
    width: ClassVar[int] = 8
    samples: ClassVar[int] = 5
    rtol: ClassVar[float] = 1e-10

    @abc.abstractmethod
    def network(self, in_features: int, width: int, *, generator: torch.Generator, dtype: torch.dtype, **options: Any) -> Any:
        """The network under test; it must pass `options` on."""

    @abc.abstractmethod
    def definition(self, tensors: Mapping[str, Tensor], X: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """(n, m) f(Z, X) and (n,) predictions at Z.

        Args:
            tensors: Parameters and buffers by name. X: (n, d) inputs. Z: (n, m) states.
        """

    def test_predictions_are_the_definition(self) -> None:
        """The equilibrium is a fixed point of the definition; predictions are its read-out."""
        network, X, _ = self._problem()
        Z, tensors = network.equilibrium(X).detach(), _tensors(network)
        image, y = self.definition(tensors, X, Z)
        require(same(image, Z, rtol=self.rtol), "equilibrium(X) is not a fixed point of `definition`")
        require(same(network(X).detach(), y, rtol=self.rtol), "network(X) is not the read-out of `definition`")
        require(same(network.solve(X).value, Z, rtol=self.rtol), "solve(X) and equilibrium(X) differ")

    def test_gradients_are_those_of_the_definition(self) -> None:
        """Autograd, the closed form `gradients`, and dense implicit differentiation agree."""
        network, X, y = self._problem()
        Z, tensors = self._exact(network, X), _tensors(network)
        trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        r = (network(X) - y).detach()
        by_autograd = torch.autograd.grad(network(X), list(trained.values()), r)
        closed = network.gradients(X, network.linearise(X), r)
        for (name, parameter), ours in zip(trained.items(), by_autograd, strict=True):
            J = implicit_jacobian(lambda t, Z: self.definition(t, X, Z), tensors, Z, name)
            expected = (r @ J).reshape(parameter.shape)
            require(same(ours, expected, rtol=100 * self.rtol), f"the gradient of {name} by autograd is not the dense one")
            require(same(closed[name], expected, rtol=100 * self.rtol), f"gradients(...)[{name!r}] is not the dense one")

    def test_tangent_kernel_is_that_of_the_definition(self) -> None:
        """Each part of the tangent kernel is J J^T of the dense Jacobian."""
        network, X, _ = self._problem()
        Z, tensors = self._exact(network, X), _tensors(network)
        parts = tangent_kernel(network, X, by_parameter=True)
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        require(set(parts) == trained, f"the kernel has the parts {sorted(parts)}; trained are {sorted(trained)}")
        for name, part in parts.items():
            J = implicit_jacobian(lambda t, Z: self.definition(t, X, Z), tensors, Z, name)
            require(same(part, J @ J.T, rtol=100 * self.rtol), f"the tangent kernel of {name} is not J J^T")

    def test_samples_are_independent(self) -> None:
        """A prediction does not depend on the other samples of the batch."""
        network, X, _ = self._problem()
        rows = torch.tensor([3, 0])
        require(same(network(X[rows]), network(X)[rows].detach(), rtol=self.rtol), "a prediction depends on its batch")

    def test_state_dict_generator_and_dtype(self) -> None:
        """Equal seeds draw equal networks; a state is loaded; float32 works."""
        network, X, _ = self._problem()
        again, _, _ = self._problem()
        require(torch.equal(network(X), again(X)), "two networks from one seed differ: draw everything from `generator`")
        other = self._network(seed=1)
        other.load_state_dict(network.state_dict())
        require(torch.equal(other(X), network(X)), "a network with the state of another gives other predictions")
        require(torch.equal(copy.deepcopy(network)(X), network(X)), "a deep copy gives other predictions")
        single = copy.deepcopy(network).float()(X.float())
        require(single.dtype == torch.float32, f"a float32 network must predict float32; got {single.dtype}")
        require(same(single.double(), network(X), rtol=1e-3), "predictions in float32 are far from those in float64")

    def test_certificates_change_nothing_and_hold(self) -> None:
        """The declared theory fits; `certify` changes nothing; descent with a certified step is as
        fast as certified."""
        network, X, y = self._problem()
        y = network(X).detach() + 1e-3 * y  # near a solution, so that a certificate holds if the theory has one
        before, wrong = _tensors(network), contradiction(network, X)
        require(not wrong, wrong)
        try:
            certificate = certify(network, X, y)
        except WellposedError:
            return  # no theorem is known for this family
        after = _tensors(network)
        require(all(torch.equal(before[name], after[name]) for name in before), "certify changed the network")
        if certificate.certified and certificate.step_size is not None and certificate.dynamics == "descent":
            history = descend(network, X, y, step_size=certificate.step_size, steps=400)
            # residuals are known up to the tolerance of the solves and the rounding of predictions
            floor = self.rtol * float(y.norm() + X.norm())
            slower = history.residual_norm > history.certified_residual(certificate.rate) * (1 + 1e-9) + floor
            require(~slower, "descent with the certified step size is slower than the certified rate")
            for name, radius in (certificate.radii or {}).items():
                moved = float((_tensors(network)[name] - before[name]).norm())
                require(moved <= radius * (1 + 1e-9), f"{name} moves by {moved:.3g}; the certified radius is {radius:.3g}")

    def _network(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        options = {"generator": generator, "dtype": torch.float64, "on_failure": "raise"}
        return self.network(self.in_features, self.width, **options)  # type: ignore[arg-type]

    def _problem(self) -> tuple[Any, Tensor, Tensor]:
        X = gaussian(self.samples, self.in_features, seed=1)
        return self._network(seed=0), X, gaussian(self.samples, seed=2)

    def _exact(self, network: Any, X: Tensor) -> Tensor:
        """(n, m) the equilibrium of the definition, to rounding."""
        tensors = _tensors(network)
        return polished(lambda Z: self.definition(tensors, X, Z)[0], network.solve(X).value)


def _tensors(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*network.named_parameters(), *network.named_buffers())}
