"""Checks behind the findings about [nguyen2022]: each fails if the printed form were right."""

from __future__ import annotations

from theorem_problems import confirm
from wellposed_lab.papers.nguyen2022 import audit_kernel as nguyen2022_kernel
from wellposed_lab.papers.nguyen2022 import audit_training as nguyen2022_training


def test_lemma_2_3_2_needs_half_the_sum() -> None:
    confirm(nguyen2022_kernel.check_lemma_2_3_2_needs_half_the_sum)


def test_2_6_2_8_norm_is_not_spectral_radius() -> None:
    confirm(nguyen2022_kernel.check_2_6_2_8_norm_is_not_spectral_radius)


def test_definition_2_5_2_smoothness_bounds_from_below() -> None:
    confirm(nguyen2022_kernel.check_definition_2_5_2_smoothness_bounds_from_below)


def test_theorem_2_5_4_rate() -> None:
    confirm(nguyen2022_kernel.check_theorem_2_5_4_rate)


def test_linear_regression_gradient() -> None:
    confirm(nguyen2022_kernel.check_linear_regression_gradient)


def test_forward_backward_endpoint_does_not_contract() -> None:
    confirm(nguyen2022_kernel.check_forward_backward_endpoint_does_not_contract)


def test_naive_iteration_diverges() -> None:
    confirm(nguyen2022_kernel.check_naive_iteration_diverges)


def test_lemma_3_2_1_identity_has_size_n_squared() -> None:
    confirm(nguyen2022_kernel.check_lemma_3_2_1_identity_has_size_n_squared)


def test_lemma_c_0_2_has_the_wrong_sign() -> None:
    confirm(nguyen2022_kernel.check_lemma_c_0_2_has_the_wrong_sign)


def test_lemma_3_2_3_kronecker_order() -> None:
    confirm(nguyen2022_kernel.check_lemma_3_2_3_kronecker_order)


def test_proposition_4_kernel_is_j_j_transposed() -> None:
    confirm(nguyen2022_kernel.check_proposition_4_kernel_is_j_j_transposed)


def test_products_of_p_a_and_p_b() -> None:
    confirm(nguyen2022_kernel.check_products_of_p_a_and_p_b)


def test_lemma_3_3_2_is_false_without_the_mask() -> None:
    confirm(nguyen2022_training.check_lemma_3_3_2_is_false_without_the_mask)


def test_lemma_3_3_6_sign() -> None:
    confirm(nguyen2022_training.check_lemma_3_3_6_sign)


def test_lemma_3_3_7_has_the_step_size() -> None:
    confirm(nguyen2022_training.check_lemma_3_3_7_has_the_step_size)


def test_flow_proof_exponent() -> None:
    confirm(nguyen2022_training.check_flow_proof_exponent)


def test_3_17_is_short_of_a_factor_two() -> None:
    confirm(nguyen2022_training.check_3_17_is_short_of_a_factor_two)


def test_3_18_can_never_hold() -> None:
    confirm(nguyen2022_training.check_3_18_can_never_hold)


def test_theorem_3_3_5_literal_counterexample_diverges() -> None:
    confirm(nguyen2022_training.check_theorem_3_3_5_literal_counterexample_diverges)


def test_square_of_the_step_bound() -> None:
    confirm(nguyen2022_training.check_square_of_the_step_bound)


def test_proposition_5_divides_by_lambda_squared() -> None:
    confirm(nguyen2022_training.check_proposition_5_divides_by_lambda_squared)
