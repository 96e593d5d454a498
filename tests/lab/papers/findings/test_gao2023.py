"""Checks behind the findings about [gao2023]: each fails if the printed form were right."""

from __future__ import annotations

from theorem_problems import confirm
from wellposed_lab.papers.gao2023 import audit as gao2023
from wellposed_lab.papers.gao2023 import audit_generalization as gao2023_generalization


def test_lemma_3_2_derivative_of_j() -> None:
    confirm(gao2023.check_lemma_3_2_derivative_of_j)


def test_drift_of_the_kernel_comes_with_changing_masks() -> None:
    confirm(gao2023.check_drift_of_the_kernel_comes_with_changing_masks)


def test_gaussian_norm_is_two_root_m() -> None:
    confirm(gao2023.check_gaussian_norm_is_two_root_m)


def test_half_normal_start_has_no_equilibrium() -> None:
    confirm(gao2023.check_half_normal_start_has_no_equilibrium)


def test_repair_by_scaling_entries_and_not_by_the_norm() -> None:
    confirm(gao2023.check_repair_by_scaling_entries_and_not_by_the_norm)


def test_25_lower_bound() -> None:
    confirm(gao2023.check_25_lower_bound)


def test_lemma_4_2_the_offset_is_not_in_the_ball() -> None:
    confirm(gao2023_generalization.check_lemma_4_2_the_offset_is_not_in_the_ball)


def test_theorem_a_3_needs_the_square_root() -> None:
    confirm(gao2023_generalization.check_theorem_a_3_needs_the_square_root)


def test_theorem_4_1_scales_like_a_square_root() -> None:
    confirm(gao2023_generalization.check_theorem_4_1_scales_like_a_square_root)


def test_spectral_form() -> None:
    confirm(gao2023_generalization.check_spectral_form)


def test_lemma_4_3_time_factor() -> None:
    confirm(gao2023_generalization.check_lemma_4_3_time_factor)


def test_proof_of_3_1_signs() -> None:
    confirm(gao2023_generalization.check_proof_of_3_1_signs)
