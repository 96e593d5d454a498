"""`wp.cite` and `to_latex`: the sources that a result names, and LaTeX that compiles."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wellposed as wp
from wellposed import _latex, _latex_characters
from wellposed.certify.certificate import Hypothesis
from wellposed.references import CITED, bibliography, cite


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),", text, re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> list[wp.Certificate | wp.Proof]:
    X, y = wp.data.load("sphere", n=5, features=20, norm="sqrt_d", dtype=torch.float64)
    model = wp.GaussianDEQ(20, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    certificate, proof = wp.certify(model, X, y), wp.prove(model, X, y)
    assert proof.verdict is wp.Verdict.CERTIFIED
    return [certificate, *certificate.others, proof]


def test_parts_name_their_sources() -> None:
    assert keys(cite()) == ["wellposed"]
    assert keys(cite(wp.ImplicitGradient())) == ["wellposed", "bai2019"]
    assert keys(cite(wp.Broyden)) == ["wellposed", "broyden1965"]
    both = keys(cite(wp.Anderson(), wp.ImplicitGradient()))
    assert set(both) == {"wellposed", "bai2019", "anderson1965", "walker2011"}
    assert both[1:] == [key for key in bibliography() if key in both]  # in the order of the file


def test_a_model_names_the_sources_of_all_its_parts() -> None:
    model = torch.nn.Sequential(wp.EquilibriumLayer(wp.nn.MonotoneConvCell(1, 2), solver=wp.Broyden()), torch.nn.Flatten())
    assert {"winston2020", "bai2019", "broyden1965"} <= set(keys(cite(model)))


def test_results_name_their_theorems(results: list[wp.Certificate | wp.Proof]) -> None:
    by_theorem = {getattr(result, "theorem", "proof"): keys(cite(result)) for result in results}
    assert by_theorem["ling2022"] == ["wellposed", "ling2022"]
    assert by_theorem["proof"] == ["wellposed", "ling2022"]
    radius = next(result for result in results if getattr(result, "theorem", "") == "radius")
    assert by_theorem["radius"] == ["wellposed"] and r"\cite[Certificates]{wellposed}" in radius.to_latex()  # our own theorem


def test_what_is_not_of_the_library_is_refused() -> None:
    for strange in (3, "ling2022", torch.zeros(2), torch.tanh, dict):
        with pytest.raises(wp.InvalidType, match="cite takes certificates, proofs, models"):
            cite(strange)


def test_entries_are_whole() -> None:
    for key, entry in bibliography().items():
        assert entry.count("{") == entry.count("}") and entry.endswith("\n}"), key
        assert CITED.fullmatch(f"[{key}]")


@pytest.mark.parametrize(
    ("plain", "latex"),
    [
        ("50 % of a_b & c", r"50 \% of a\_b \& c"),
        ("[ling2022, (7)] with 8", r"\cite[(7)]{ling2022} with 8"),
        ("see [bai2019].", r"see \cite{bai2019}."),
        ("[wellposed, Certificates]", r"\cite[Certificates]{wellposed}"),
        ("|r| <= 1.5e-08", r"\textbar{}r\textbar{} $\le$ $1.5\times 10^{-8}$"),
        ("v1e5x and 2e3", r"v1e5x and $2\times 10^{3}$"),
        (r"a\b{c}", r"a\textbackslash{}b\{c\}"),
    ],
)
def test_text(plain: str, latex: str) -> None:
    assert _latex.text(plain) == latex


@pytest.mark.parametrize(
    ("plain", "latex"),
    [
        ("‖W‖ ≤ ε", r"$\|$W$\|$ $\le$ $\varepsilon$"),
        (
            "λ ≥ Λ ≠ Α × √2 − ∞ … ± · ∈ ℝ",
            r"$\lambda$ $\ge$ $\Lambda$ $\ne$ $A$ $\times$ $\surd$2 $-$ $\infty$ \dots{} $\pm$ $\cdot$ $\in$ $\mathbf{R}$",
        ),
        ("Žižek, naïve, λ̄, z̄, ά", r"\v{Z}i\v{z}ek, na\"{\i}ve, $\bar{\lambda}$, \={z}, $\acute{\alpha}$"),
        ("x² a₁ ½ 𝐖 ﬁ", "x$^{2}$ a$_{1}$ 1/2 W fi"),
        ("a\x07 😀 \ue000", "a(U+0007) (grinning face) (U+E000)"),
        ("٣e5", "(arabic-indic digit three)e5"),
    ],
)
def test_other_alphabets(plain: str, latex: str) -> None:
    assert _latex.text(plain) == latex


@given(st.text(max_size=60))
def test_text_is_ascii(plain: str) -> None:
    latex = _latex.text(plain)
    assert latex.isascii() and (latex.isprintable() or not latex)
    assert latex.count("$") % 2 == latex.count(r"\$") % 2


def test_numbers() -> None:
    assert [_latex.number(v) for v in (6.6171, 1.28e-18, -2e9, 0.0, None)] == [
        "$6.617$", r"$1.28\times 10^{-18}$", r"$-2\times 10^{9}$", "$0$", "--",
    ]  # fmt: skip
    assert _latex.number(float("inf")) == r"$\infty$" and _latex.number(float("nan")) == "--"


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=60))
def test_no_special_character_is_left(plain: str) -> None:
    latex = re.sub(r"\\(textbackslash|textasciicircum|textasciitilde|textbar|textless|textgreater)\{\}", "", _latex.text(plain))
    latex = re.sub(r"\\cite(\[.*?\])?\{\w+\}", "", latex)
    latex = re.sub(r"\$(\\le|\\ge|-?[\d.]+\\times 10\^\{-?\d+\})\$", "", latex)
    assert not re.search(r"(?<!\\)[{}$&#%_^~|<>]", latex) and not re.search(r"\\[^{}$&#%_]", latex)


def test_bibtex_reads_the_bibliography(tmp_path: Path) -> None:
    if shutil.which("bibtex") is None:
        pytest.skip("bibtex is not installed")
    (tmp_path / "all.bib").write_text("\n".join([cite(), *bibliography().values()]), encoding="utf-8")
    (tmp_path / "paper.aux").write_text("\\citation{*}\n\\bibstyle{plain}\n\\bibdata{all}\n")
    done = subprocess.run(["bibtex", "paper"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Warning" not in done.stdout, done.stdout


@pytest.fixture
def latex(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    yield tmp_path


def test_tables_compile(latex: Path, results: list[wp.Certificate | wp.Proof]) -> None:
    certificate = results[0]
    assert isinstance(certificate, wp.Certificate)
    nasty = Hypothesis(r"50 % of {a_b} & \c ~ #1 $", "[ling2022, (7)]", float("inf"), None, "<", None)
    foreign = Hypothesis("‖W‖ ≤ ε λ̄ √2 ï 😀 " + " ".join(_latex_characters.MATHEMATICS), "Žižek", 1.0, 2.0, "<", True)
    odd = dataclasses.replace(certificate, verdict=wp.Verdict.UNDECIDED, hypotheses=(nasty, foreign), note="|x|^2 >= 1e-300")
    body = "\n".join(result.to_latex() for result in [*results, odd])
    assert r"\cite[(7)]{ling2022}" in body and body.isascii()
    wide = Hypothesis(
        "a parametrization of a module of one's own", "[winston2020, Proposition 1]", 1.2345e-123, 1.2345e123, "<", None
    )
    body += dataclasses.replace(odd, hypotheses=(wide,)).to_latex() + own_certificates()
    start, end = r"\documentclass{article}\begin{document}", r"\end{document}"
    (latex / "results.tex").write_text(f"{start}\n{body}\n{end}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "results.tex"]
    done = subprocess.run(command, cwd=latex, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and (latex / "results.pdf").exists(), done.stdout[-2000:]
    assert "Overfull" not in done.stdout  # wider than the lines of an article


def own_certificates() -> str:
    """Tables about layers from outside the families."""
    generator = torch.Generator().manual_seed(0)
    cell = torch.nn.Linear(6, 6)
    layers = [
        wp.EquilibriumLayer(wp.nn.DenseCell(6, 6, weight=weight, generator=generator))
        for weight in (wp.nn.Spectral(0.9), wp.nn.Monotone(0.1))
    ]
    layers.append(wp.EquilibriumLayer(lambda z, x: torch.tanh(0.1 * cell(z) + x)))
    found = [wp.certify(layer, *x) for layer in layers for x in ((), (torch.ones(2, 6),))]
    return "\n".join(table.to_latex() for certificate in found for table in (certificate, *certificate.others))


def test_what_may_be_long_wraps() -> None:
    """Less than half a line for the words leaves room for two numbers, a relation and a verdict."""
    wide = Hypothesis("a long name " * 9, "[winston2020, Proposition 1] " * 3, 1.234e-12, 1.234e-12, "<", None)
    table = wp.Certificate("own", wp.Verdict.UNDECIDED, (wide,)).to_latex()
    fractions = re.search(r"\{tabular\}\{p\{([\d.]+)\\linewidth\}p\{([\d.]+)\\linewidth\}rcrl\}", table)
    assert fractions is not None and 0.4 <= sum(map(float, fractions.groups())) < 0.5


def test_tables_hold_the_numbers(results: list[wp.Certificate | wp.Proof]) -> None:
    certificate, proof = results[0], results[-1]
    assert isinstance(certificate, wp.Certificate) and isinstance(proof, wp.Proof)
    table = certificate.to_latex()
    assert table.count(r"\\") == 1 + len(certificate.hypotheses)
    for hypothesis in certificate.hypotheses:
        assert _latex.number(hypothesis.value) in table
    assert "certified" in table and _latex.number(certificate.rate, 10) in table
    assert "ends at zero loss" in proof.to_latex() and f"{proof.num_steps}, exact descent" in proof.to_latex()
