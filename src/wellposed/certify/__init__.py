"""Certificates: from a model and data to a proof, or an honest 'not proved'."""

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict

__all__ = ["Certificate", "Hypothesis", "Verdict"]
