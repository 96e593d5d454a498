"""Checks behind the findings about [xie2021]: each fails if the printed form were right."""

from __future__ import annotations

from theorem_problems import confirm
from wellposed_lab.papers.xie2021 import audit as xie2021


def test_explicit_objective_has_the_transposed_inverse() -> None:
    confirm(xie2021.check_explicit_objective_has_the_transposed_inverse)


def test_skip_needs_the_factor_alpha() -> None:
    confirm(xie2021.check_skip_needs_the_factor_alpha)


def test_lemma_6_needs_the_inverse() -> None:
    confirm(xie2021.check_lemma_6_needs_the_inverse)


def test_lemma_4_fails_for_singular_matrices() -> None:
    confirm(xie2021.check_lemma_4_fails_for_singular_matrices)


def test_lemma_2_with_w_1_zero_outputs_zero() -> None:
    confirm(xie2021.check_lemma_2_with_w_1_zero_outputs_zero)


def test_appended_prox_is_a_new_block() -> None:
    confirm(xie2021.check_appended_prox_is_a_new_block)


def test_inverse_regularizer_is_not_convex() -> None:
    confirm(xie2021.check_inverse_regularizer_is_not_convex)


def test_lemma_11_lost_one_minus_beta() -> None:
    confirm(xie2021.check_lemma_11_lost_one_minus_beta)


def test_17_identities_have_other_sizes() -> None:
    confirm(xie2021.check_17_identities_have_other_sizes)


def test_lemma_16_bias_gradients_can_vanish() -> None:
    confirm(xie2021.check_lemma_16_bias_gradients_can_vanish)


def test_theorem_5_cannot_hold_for_equal_inputs() -> None:
    confirm(xie2021.check_theorem_5_cannot_hold_for_equal_inputs)
