"""A bound that was proved of other code does not count: subclasses, patches, foreign operators."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.imaging import (
    DEQADMM,
    MRI,
    AbstractForwardOperator,
    AdaptiveDenoiser,
    Blur,
    BoundedDnCNN,
    DEQGrad,
    DEQProx,
    Inpainting,
    Reconstructor,
    gaussian_kernel,
)

KERNEL = gaussian_kernel(1.0)


def denoiser(kind: type[BoundedDnCNN] = BoundedDnCNN) -> BoundedDnCNN:
    return kind(1, 4, 2, bound=0.9, generator=torch.Generator().manual_seed(0))


def expansion(cell: Any) -> float:
    """The largest |f(a + d) - f(a)| / |d| that was found, in float64."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    exact, y = copy.deepcopy(cell).double(), torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        for size in (0.1, 1.0, 10.0):
            a, d = (torch.randn(1, 1, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
            for _ in range(15):
                change = exact(size * a + 1e-4 * d / d.norm(), y) - exact(size * a, y)
                worst, d = max(worst, float(change.norm()) / 1e-4), change
    return worst


class LargerNetwork(BoundedDnCNN):
    def apply_weights(self, x: Tensor, weights: Any) -> Tensor:
        return 3 * super().apply_weights(x, weights)


class LargerOperator(Blur):
    def A(self, x: Tensor) -> Tensor:
        return 3 * super().A(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return 3 * super().A_adjoint(y)

    def normal(self, x: Tensor) -> Tensor:
        return 9 * super().normal(x)


class WithoutNorm(AbstractForwardOperator):
    """Inherits norm = 1, which is not its own."""

    def A(self, x: Tensor) -> Tensor:
        return 3 * x

    def A_adjoint(self, y: Tensor) -> Tensor:
        return 3 * y

    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        return (z + 3 * gamma * y) / (1 + 9 * gamma)


class LargerCell(DEQGrad):
    def _step(self, *given: Any) -> Tensor:
        return given[0] + 3 * (super()._step(*given) - given[0])


def patched(cell: Any, part: str, method: str, factor: float) -> Any:
    """The cell, with a method of a part of it replaced on the object."""
    thing = cell if part == "cell" else getattr(cell, part)
    found = getattr(thing, method)
    setattr(thing, method, lambda *given: factor * found(*given))
    return cell


FALSE: dict[str, Callable[[], Any]] = {
    "subclass of a network": lambda: DEQProx(Blur(KERNEL), denoiser(LargerNetwork)),
    "subclass of a network, ADMM": lambda: DEQADMM(Blur(KERNEL), denoiser(LargerNetwork)),
    "subclass of an operator": lambda: DEQGrad(LargerOperator(KERNEL), denoiser()),
    "operator without a norm": lambda: DEQProx(WithoutNorm(), denoiser()),
    "subclass of a cell": lambda: LargerCell(Blur(KERNEL), denoiser(), weight=1.0),
    "patched network": lambda: patched(DEQProx(Blur(KERNEL), denoiser()), "network", "apply_weights", 3.0),
    "patched operator": lambda: patched(DEQGrad(Blur(KERNEL), denoiser()), "operator", "normal", 9.0),
    "patched cell": lambda: patched(DEQProx(Blur(KERNEL), denoiser()), "cell", "_step", 4.0),
}


@pytest.mark.parametrize("name", FALSE)
def test_an_inherited_bound_of_other_code_proves_nothing(name: str) -> None:
    cell = FALSE[name]()
    assert expansion(cell) > 1  # so a factor below 1 would be false
    assert cell.contraction == math.inf
    model = Reconstructor(cell, on_failure="ignore", max_steps=3)
    y = torch.ones(2, 1, 8, 8)
    model(y)
    assert model.error_bound(y).tolist() == [math.inf] * 2


class Named(DEQGrad):
    """Changes nothing."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.note = "mine"


class NamedNetwork(BoundedDnCNN):
    def extra_repr(self) -> str:
        return "mine"


class OwnBound(LargerNetwork):
    @property
    def lipschitz(self) -> float:
        return 3 * super().lipschitz


class OwnNorm(WithoutNorm):
    norm = 3.0


class Faint(Blur):
    """A tenth of a blur: all that it must state, without `normal`."""

    @property
    def norm(self) -> float:  # type: ignore[override]
        return 0.1 * super().norm

    def A(self, x: Tensor) -> Tensor:
        return 0.1 * super().A(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return 0.1 * super().A_adjoint(y)


@pytest.mark.parametrize("kind", [DEQGrad, DEQProx])
def test_a_subclass_with_its_own_operator_is_not_solved_with_the_normal_of_its_base(kind: Any) -> None:
    cell, generator = kind(Faint(KERNEL), denoiser()), torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 2, 1, 8, 8, generator=generator)
    pattern = kind(Blur(0.1 * KERNEL), denoiser())  # the same A
    torch.testing.assert_close(cell(x, y), pattern(x, y), rtol=0, atol=64 * torch.finfo(x.dtype).eps)
    assert expansion(cell) <= cell.contraction < 1


class FaintWithProx(Faint):
    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        # gamma |B x / 10 - y|^2 = gamma / 100 |B x - 10 y|^2; Blur calls our A_adjoint, B^T / 10
        return super().prox_l2(z, 100 * y, gamma / 100)


class NamedBlur(Blur):
    def extra_repr(self) -> str:
        return "named"


def test_a_subclass_with_its_own_operator_is_not_solved_with_the_prox_of_its_base() -> None:
    with pytest.raises(InvalidArgument, match="DEQADMM uses prox_l2 of Blur, but Faint has another A. Define prox_l2 for it"):
        DEQADMM(Faint(KERNEL), denoiser())
    x, y = torch.rand(2, 2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for own, pattern in ((FaintWithProx(KERNEL), Blur(0.1 * KERNEL)), (NamedBlur(KERNEL), Blur(KERNEL))):
        found, expected = (DEQADMM(operator, denoiser())(x, y) for operator in (own, pattern))
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(x.dtype).eps)
    cell = DEQADMM(Blur(KERNEL), denoiser())
    cell.operator.A = lambda x: 2 * x
    with pytest.raises(InvalidArgument, match="but Blur has another A"):
        cell(x, y)


class OwnBase(nn.Module):
    """A base of other code, whose `prox_l2` is that of the A of its subclass."""

    norm = 1.0

    def A(self, x: Tensor) -> Tensor:
        return x

    A_adjoint = A

    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        one = self.A(torch.ones_like(z))  # A is diagonal
        return (z + gamma * self.A_adjoint(y)) / (1 + gamma * one * one)


class OwnHalf(OwnBase):
    norm = 0.5

    def A(self, x: Tensor) -> Tensor:
        return x / 2

    A_adjoint = A


def test_a_base_of_other_code_may_compute_its_prox_from_the_operator_of_a_subclass() -> None:
    x, y = torch.rand(2, 2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    cell = DEQADMM(OwnHalf(), denoiser())
    torch.testing.assert_close(cell(x, y), DEQADMM(Blur(0.5 * torch.ones(1, 1)), denoiser())(x, y))
    assert cell.contraction < 1


class WrongProx(Blur):
    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        return 5 * z


class StatedProx(WrongProx):
    reflection = 9.0


def test_no_factor_is_claimed_of_a_prox_that_replaces_that_of_the_package() -> None:
    assert math.isinf(DEQADMM(WrongProx(KERNEL), denoiser(), norm=1.0).contraction)
    stated = DEQADMM(StatedProx(KERNEL), denoiser(), norm=1.0)
    assert stated.reflection == 9.0 and expansion(stated) <= stated.contraction
    patched = DEQADMM(Blur(KERNEL), denoiser(), norm=1.0)
    assert patched.contraction < 1
    patched.operator.prox_l2 = lambda z, y, gamma: 5 * z
    assert math.isinf(patched.contraction)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda: Named(Blur(KERNEL), denoiser()), 0.9909),
        (lambda: DEQProx(Blur(KERNEL), denoiser(NamedNetwork)), 0.9),
        (lambda: DEQProx(Blur(KERNEL), denoiser(OwnBound)), 2.7),
        (lambda: DEQProx(OwnNorm(), denoiser()), 0.9),
        (lambda: DEQProx(WithoutNorm(), denoiser(), norm=3.0), 0.9),
        (lambda: DEQProx(Inpainting(torch.ones(8, 8)), denoiser()), 0.9),
    ],
    ids=["cell", "network", "own bound", "own norm", "given norm", "inpainting"],
)
def test_a_subclass_that_changes_nothing_or_states_its_own_bound_counts(make: Callable[[], Any], factor: float) -> None:
    assert make().contraction == pytest.approx(factor, rel=1e-4)


def test_what_a_cell_would_ignore_is_refused() -> None:
    class Forward(BoundedDnCNN):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    hooked = denoiser()
    hooked.register_forward_hook(lambda module, given, output: 3 * output)
    for network, says in ((denoiser(Forward), "the `forward` of Forward"), (hooked, "a forward hook of BoundedDnCNN")):
        with pytest.raises(InvalidArgument, match=f"{says}.* would be ignored. Override `apply_weights`"):
            Reconstructor(DEQProx(Blur(KERNEL), network))(torch.ones(1, 1, 8, 8))


class Half(nn.Module):
    """A network of the user."""

    lipschitz = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 + self.shift


def test_nothing_is_proved_of_a_network_or_a_cell_with_a_hook() -> None:
    y = torch.ones(2, 1, 8, 8)
    before, after, around = Half(), Half(), DEQProx(Blur(KERNEL), Half())
    before.register_forward_pre_hook(lambda module, given: (10 * given[0],))
    after.register_forward_hook(lambda module, given, output: 10 * output)
    model = Reconstructor(around, on_failure="ignore", max_steps=3)
    model(y)
    around.register_forward_hook(lambda module, given, output: given[0])  # every state would be an equilibrium
    for cell in (DEQProx(Blur(KERNEL), before), DEQProx(Blur(KERNEL), after), around):
        assert cell.contraction == math.inf
    assert model.error_bound(y).tolist() == [math.inf] * 2


class Foreign:
    """y = factor x, as an object of another library."""

    norm = 1.0

    def __init__(self, factor: float = 1.0, adjoint: float = 1.0, prox: float = 0.5) -> None:
        self.Q, self.adjoint, self.prox = torch.tensor(factor), adjoint, prox

    def A(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.Q)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.adjoint * torch.mul(y, self.Q)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: Any) -> Tensor:
        return self.prox * z


@pytest.mark.parametrize(
    ("cell", "operator", "says"),
    [
        (DEQGrad, Foreign(adjoint=-1.0), r"A_adjoint of Foreign is not the adjoint of A"),
        (DEQProx, Foreign(adjoint=0.9), r"A_adjoint of Foreign is not the adjoint of A"),
        (DEQProx, Foreign(3.0), r"The norm of Foreign, 1, is too small: \|A x\| is 3 for an x with \|x\| = 1"),
        (DEQADMM, Foreign(prox=-3.0), r"prox_l2 of Foreign is not a proximal map.* expands by 7"),
    ],
    ids=["sign", "scale", "norm", "prox"],
)
def test_a_foreign_operator_that_is_not_what_it_says_has_no_error_bound(cell: Any, operator: Foreign, says: str) -> None:
    model = Reconstructor(cell(operator, denoiser()), on_failure="ignore", max_steps=3)
    y = torch.ones(2, 1, 8, 8)
    model(y)
    with pytest.raises(InvalidArgument, match=says):
        model.error_bound(y)


def assigned(key: str, value: Any) -> Inpainting:
    """Half of the pixels, with a claim of the caller."""
    operator = Inpainting(torch.arange(8) % 2 * torch.ones(8, 1))
    setattr(operator, key, value)
    return operator


def with_prox(prox: Any) -> Inpainting:
    """Whose owner also states its reflection: else nothing is claimed."""
    operator = assigned("prox_l2", prox)
    operator.reflection = 1.0
    return operator


class WithNormal(Foreign):
    norm = 1.0

    def normal(self, x: Tensor) -> Tensor:
        return 9 * x


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DEQProx(Blur(KERNEL), denoiser(), norm=0.1), r"The norm of Blur, 0.1, is too small: \|A x\| is 0\.9"),
        (lambda: DEQProx(assigned("norm", 0.1), denoiser()), r"The norm of Inpainting, 0.1, is too small: \|A x\| is 1"),
        (lambda: DEQProx(assigned("least", 0.9), denoiser()), r"'least' of Inpainting, 0.9, is too large: \|A x\|\^2 is 0"),
        (lambda: DEQADMM(with_prox(lambda z, y, g: 3 * z), denoiser(), norm=1.0), "prox_l2 of Inpainting is not"),
        (lambda: DEQGrad(WithNormal(), denoiser(), norm=1.0), r"normal of WithNormal is not x -> A_adjoint\(A\(x\)\)"),
    ],
    ids=["given norm", "assigned norm", "assigned least", "assigned prox", "normal"],
)
def test_claims_of_the_caller_are_tried_also_of_an_operator_of_the_package(make: Callable[[], Any], says: str) -> None:
    model, y = Reconstructor(make(), on_failure="ignore", max_steps=3), torch.ones(2, 1, 8, 8)
    model(y)
    with pytest.raises(InvalidArgument, match=says):
        model.error_bound(y)


def test_a_foreign_operator_with_tensors_of_float32_has_an_error_bound() -> None:
    class Rows(Foreign):
        def __init__(self) -> None:
            super().__init__()
            self.Q = torch.eye(64)[:20]

        def A(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.Q.T

        def A_adjoint(self, y: Tensor) -> Tensor:
            return (y @ self.Q).reshape(-1, 1, 8, 8)

    operator = Rows()
    operator.norm = 1.0  # of the object: its class overrides A
    model, y = Reconstructor(DEQGrad(operator, denoiser(), weight=1.0), rtol=1e-4), torch.ones(2, 20)
    model(y)
    assert model.error_bound(y).isfinite().all() and operator.Q.dtype == torch.float32


@pytest.mark.parametrize("kind", [MRI, Inpainting])
@pytest.mark.parametrize("value", [0.5, 2.0, math.nan, 1j], ids=str)
def test_a_mask_has_only_0_and_1(kind: type, value: complex) -> None:
    mask = torch.ones(8, 8, dtype=torch.complex64 if isinstance(value, complex) else torch.float32)
    kind(mask)
    mask[3, 4] = value
    with pytest.raises(InvalidArgument, match=rf"{kind.__name__} expects a mask of 0 and 1.*got"):
        kind(mask)


def test_a_compiled_and_a_parametrized_network_are_as_they_were() -> None:
    network = AdaptiveDenoiser(1, 4, hidden=4, bound=0.9)
    nn.utils.parametrizations.spectral_norm(network, "kernel")
    for made in (torch.compile(denoiser(), backend="eager"), network):
        assert DEQProx(Blur(KERNEL), made).contraction == pytest.approx(0.9, rel=1e-4)
