"""Every message that docs/troubleshooting.md quotes is one that the sources give."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

import doc_hooks
from wellposed.status import Status

PAGE = (doc_hooks.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
#: What stands on the page in the place of a name or a number.
DOTS = "..."


def quoted() -> list[str]:
    """The headings of the page, and sentences in quotation marks; without the part that quotes nothing."""
    text = PAGE.partition("\n## Without a message\n")[0]
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^### (.*)$", text, flags=re.MULTILINE) + [
        " ".join(sentence.split()) for sentence in re.findall(r'"([^"]*)"', prose)
    ]


@cache
def texts() -> tuple[str, ...]:
    """All texts of the sources but docstrings, with dots in the place of what is filled in."""
    found = set()
    for path in (doc_hooks.ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in documentation:
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [str(part.value) if isinstance(part, ast.Constant) else DOTS for part in parts]
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                found.add(" ".join("".join(words).split()))
    return tuple(found)


def occurs(message: str) -> bool:
    """Whether the fixed words of a message stand in one text, in this order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split(DOTS)))
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_sources(message: str) -> None:
    assert occurs(message), f"no text of the sources has the words of {message!r}; quote the message as it is now"


def test_the_page_has_the_common_messages() -> None:
    assert len(re.findall(r"^### ", PAGE, flags=re.MULTILINE)) >= 25
    assert "the residual met the tolerance" not in quoted()  # nothing to mend
    assert not occurs("the residual did not meet the tolerance")


def test_every_status_of_a_failure_has_its_section() -> None:
    for status in set(Status) - {Status.CONVERGED}:
        assert status.message in quoted(), f"docs/troubleshooting.md lacks {status.name}"
