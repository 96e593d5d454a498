"""Checks behind the findings about [ling2022]: each fails if the printed form were right."""

from __future__ import annotations

from theorem_problems import confirm
from wellposed_lab.papers.ling2022 import audit as ling2022


def test_lemma_1_threshold_is_the_spectral_edge() -> None:
    confirm(ling2022.check_lemma_1_threshold_is_the_spectral_edge)


def test_lemma_2_kronecker_order() -> None:
    confirm(ling2022.check_lemma_2_kronecker_order)


def test_lemma_3_index_of_rho() -> None:
    confirm(ling2022.check_lemma_3_index_of_rho)


def test_13_index_of_rho() -> None:
    confirm(ling2022.check_13_index_of_rho)


def test_theorem_2_is_an_order() -> None:
    confirm(ling2022.check_theorem_2_is_an_order)


def test_9_constant_eight() -> None:
    confirm(ling2022.check_9_constant_eight)


def test_9_can_never_hold_under_assumption_1() -> None:
    confirm(ling2022.check_9_can_never_hold_under_assumption_1)


def test_one_radius_for_all_is_poorer() -> None:
    confirm(ling2022.check_one_radius_for_all_is_poorer)
