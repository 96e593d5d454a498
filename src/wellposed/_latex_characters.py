"""Characters in LaTeX that needs no package and is plain ASCII: pdflatex stops at most others."""

from __future__ import annotations

import re
import unicodedata

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "`": "",
    '"': "''",
}
_TEXT = {
    "\u2013": "--",
    "\u2014": "---",
    "\u2018": "`",
    "\u2019": "'",
    "\u201c": "``",
    "\u201d": "''",
    "\u2026": r"\dots{}",
    "\u2044": "/",  # of a fraction such as 1/2 in one character
    "\u00a7": r"\S{}",
    "\u00df": r"\ss{}",
    "\u00e6": r"\ae{}",
    "\u00c6": r"\AE{}",
    "\u0153": r"\oe{}",
    "\u0152": r"\OE{}",
    "\u00f8": r"\o{}",
    "\u00d8": r"\O{}",
    "\u0142": r"\l{}",
    "\u0141": r"\L{}",
}
_OPERATORS = (
    r"≤ \le ≥ \ge ≠ \ne ≈ \approx ≡ \equiv ∼ \sim ≃ \simeq ≅ \cong ∝ \propto ≪ \ll ≫ \gg ≺ \prec ≻ \succ ≼ \preceq ≽ \succeq "
    r"⪯ \preceq ⪰ \succeq × \times ÷ \div · \cdot ⋅ \cdot ∗ \ast ∘ \circ ± \pm ∓ \mp − - ⊕ \oplus ⊗ \otimes ⊙ \odot √ \surd "
    r"‖ \| ∥ \| ∣ | ∞ \infty ∂ \partial ∇ \nabla ∑ \sum ∏ \prod ∫ \int ∈ \in ∉ \notin ∋ \ni ⊂ \subset ⊆ \subseteq ⊃ \supset "
    r"⊇ \supseteq ∪ \cup ∩ \cap ∅ \emptyset ∀ \forall ∃ \exists ¬ \neg ∧ \wedge ∨ \vee → \to ← \leftarrow ↦ \mapsto "
    r"↔ \leftrightarrow ⇒ \Rightarrow ⇐ \Leftarrow ⇔ \Leftrightarrow ↑ \uparrow ↓ \downarrow ⊤ \top ⊥ \perp † \dagger "
    r"′ ' ° ^\circ ⟨ \langle ⟩ \rangle ⌈ \lceil ⌉ \rceil ⌊ \lfloor ⌋ \rfloor ℓ \ell ℝ \mathbf{R} ℂ \mathbf{C} ℕ \mathbf{N} "
    r"ℤ \mathbf{Z} ϵ \epsilon ϑ \vartheta ϕ \phi ϱ \varrho ϖ \varpi"
).split()
_LETTERS = (
    "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau upsilon "
    "varphi chi psi omega"
).split()
#: Greek capitals that have a command; the others look like Latin letters.
_CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega".split()
_LIKE_LATIN = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX", strict=True)) | {"ο": "o"}  # the keys are Greek
#: Set as mathematics.
MATHEMATICS = (
    dict(zip(_OPERATORS[::2], _OPERATORS[1::2], strict=True))
    | {chr(ord("α") + i): "\\" + name for i, name in enumerate(_LETTERS)}
    | {unicodedata.lookup(f"GREEK CAPITAL LETTER {name.replace('mb', 'm')}"): "\\" + name for name in _CAPITALS}
    | _LIKE_LATIN
)
#: Marks over the letter before them: in text, and in mathematics.
_MARKS = {
    "\u0300": (r"\`", r"\grave"),
    "\u0301": (r"\'", r"\acute"),
    "\u0302": (r"\^", r"\hat"),
    "\u0303": (r"\~", r"\tilde"),
    "\u0304": (r"\=", r"\bar"),
    "\u0306": (r"\u", r"\breve"),
    "\u0307": (r"\.", r"\dot"),
    "\u0308": (r"\"", r"\ddot"),
    "\u030a": (r"\r", r"\mathring"),
    "\u030b": (r"\H", None),
    "\u030c": (r"\v", r"\check"),
    "\u0327": (r"\c", None),
}
_MARKED = re.compile(f".[{''.join(_MARKS)}]|.", re.DOTALL)


def in_ascii(plain: str) -> str:
    """Text with its special characters escaped and other alphabets as commands; a character that
    LaTeX has no command for is named in parentheses."""
    return _each(unicodedata.normalize("NFC", plain))


def _each(plain: str) -> str:
    return "".join(_character(found[0]) for found in _MARKED.finditer(plain))


def _character(character: str) -> str:
    if len(character) == 2:
        return _marked(*character)
    for table in (_SPECIAL, _TEXT):
        if character in table:
            return table[character]
    if character in MATHEMATICS:
        return f"${MATHEMATICS[character]}$"
    if character.isascii() and (character.isprintable() or character.isspace()):
        return character
    kind, _, _ = unicodedata.decomposition(character).partition(" ")
    simpler = unicodedata.normalize("NFKD", character)
    if simpler != character:  # such as an accented e, a raised 2, or a bold W
        inside = _each(simpler)
        raised = {"<super>": "^", "<sub>": "_"}.get(kind)
        return inside if raised is None else f"${raised}{{{inside.replace('$', '')}}}$"
    name = unicodedata.name(character, "").lower()
    return f"({name or f'U+{ord(character):04X}'})"


def _marked(letter: str, mark: str) -> str:
    """A letter with a mark; i and j lose their dot."""
    in_text, in_mathematics = _MARKS[mark]
    if letter in MATHEMATICS and in_mathematics is not None:
        return f"${in_mathematics}{{{MATHEMATICS[letter]}}}$"
    if not (letter.isascii() and letter.isalpha()):
        return _character(letter) + _character(mark)
    return f"{in_text}{{{letter if letter not in 'ij' else chr(92) + letter}}}"
