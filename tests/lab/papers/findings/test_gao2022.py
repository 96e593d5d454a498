"""Checks behind the findings about [gao2022]: each fails if the printed form were right."""

from __future__ import annotations

from theorem_problems import confirm
from wellposed_lab.papers.gao2022 import audit as gao2022


def test_9_is_about_singular_values() -> None:
    confirm(gao2022.check_9_is_about_singular_values)


def test_10_lost_the_factor() -> None:
    confirm(gao2022.check_10_lost_the_factor)


def test_15_one_is_the_matrix_of_ones() -> None:
    confirm(gao2022.check_15_one_is_the_matrix_of_ones)


def test_17_inverse_transposed() -> None:
    confirm(gao2022.check_17_inverse_transposed)


def test_lemma_3_3_is_an_order() -> None:
    confirm(gao2022.check_lemma_3_3_is_an_order)


def test_lemma_3_4_relu_is_not_lipschitz_in_operator_norm() -> None:
    confirm(gao2022.check_lemma_3_4_relu_is_not_lipschitz_in_operator_norm)


def test_lemma_3_5_contradicts_its_own_width() -> None:
    confirm(gao2022.check_lemma_3_5_contradicts_its_own_width)


def test_theorem_3_1_width_of_the_repaired_proof() -> None:
    confirm(gao2022.check_theorem_3_1_width_of_the_repaired_proof)


def test_lemma_3_6_cross_term_does_not_shrink() -> None:
    confirm(gao2022.check_lemma_3_6_cross_term_does_not_shrink)
