"""The public names: sorted, complete, importable, and few."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import traceback
from pathlib import Path

import pytest

import wellposed

PACKAGES = ["wellposed"] + [
    f"wellposed.{info.name}"
    for info in pkgutil.iter_modules(wellposed.__path__)
    if info.ispkg and not info.name.startswith("_")
]
#: Most public names of a package; a new one needs a reason, or takes the place of another.
MOST = {
    "wellposed": 64,
    "wellposed.data": 2,
    "wellposed.descent": 6,
    "wellposed.imaging": 14,
    "wellposed.landscape": 12,
    "wellposed.nn": 45,
    "wellposed.plot": 8,
    "wellposed.sklearn": 2,
    "wellposed.tasks": 5,
    "wellposed.testing": 8,
}
#: Most public names of all packages together: 170 for the core, those of the tasks, `cite` and `nn.Pretrained`.
MOST_TOGETHER = 170 + 20 + 2


#: What tutorials and checks from outside are written against; each stays a public name of `wellposed`.
PROMISED = """
    fixed_point root Picard Anderson Broyden NewtonKrylov Auto ForwardBackward PeacemanRachford DouglasRachford Status
    NotConverged EquilibriumLayer ImplicitGradient PhantomGradient JacobianFree UnrolledGradient attach_gradient export
    GaussianDEQ SkipDEQ ImplicitOnlyDEQ MonotoneDEQ OptEq DeepOptEq tangent_kernel least_eigenvalue certify Verdict
    generalization_bound descend flow CertificateMonitor prove verify DenseSolve
""".split()


def test_what_is_promised_is_public() -> None:
    assert not set(PROMISED) - set(wellposed.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_exports_are_sorted_and_importable(name: str) -> None:
    package = importlib.import_module(name)
    assert hasattr(package, "__all__"), f"{name} does not define what is public"
    exported = list(package.__all__)
    assert exported == sorted(set(exported))
    missing = [export for export in exported if not hasattr(package, export)]
    assert not missing, f"{name} exports names it does not have: {missing}"


@pytest.mark.parametrize("name", PACKAGES[1:])
def test_a_package_imports_only_what_it_exports(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{name}.")]
    types = {"CertifyPackage", "ProvePackage"}  # of the packages that can be called
    found = {alias.asname or alias.name for node in own for alias in node.names} - types
    assert found <= set(package.__all__), found - set(package.__all__)


def test_sub_packages_are_attributes() -> None:
    for name in PACKAGES[1:]:
        assert hasattr(wellposed, name.removeprefix("wellposed.")), f"`import wellposed` does not load {name}"


@pytest.mark.parametrize("name", MOST)
def test_a_package_has_few_names(name: str) -> None:
    assert len(importlib.import_module(name).__all__) <= MOST[name]


def test_all_packages_together_have_few_names() -> None:
    names = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    assert len(names) <= MOST_TOGETHER, f"{len(names)} public names; make plumbing private or raise the number with a reason"


@pytest.mark.parametrize(("name", "place"), [("train", "wellposed.descent"), ("experiments", "wellposed_lab.papers")])
def test_a_former_name_leads_to_the_new_place(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; its content is now in .*{place}"):
        getattr(wellposed, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        _ = wellposed.nonsense


def test_a_misspelt_name_gets_a_suggestion() -> None:
    for wrong, right in [("Andersen", "Anderson"), ("certfy", "certify"), ("EquilibriumClasifier", "EquilibriumClassifier")]:
        with pytest.raises(AttributeError, match=f"no attribute '{wrong}'. Did you mean '{right}'[?]$") as caught:
            getattr(wellposed, wrong)
        shown = "".join(traceback.format_exception(caught.value))
        assert shown.count("Did you mean") == 1  # Python has suggestions of its own


def test_one_class_name_means_one_thing() -> None:
    """A name of a class is defined once in both packages; names that begin with _ are of one file."""
    places: dict[str, list[str]] = {}
    for path in Path(str(wellposed.__file__)).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
