"""The page about reproduction names every experiment, and every claim word for word."""

from __future__ import annotations

from pathlib import Path

from wellposed_lab.papers import EXPERIMENTS

PAGE = (Path(__file__).parents[3] / "docs" / "reproduce.md").read_text(encoding="utf-8").replace("\\|", "|")


def test_every_claim_is_on_the_page() -> None:
    for experiment in EXPERIMENTS.values():
        assert f"`{experiment.name}`" in PAGE
        for claim in experiment.claims:
            assert claim.text in PAGE, f"docs/reproduce.md does not tell about: {claim.text}"
