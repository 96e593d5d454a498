"""The audit: every claim of the papers that the package rests on, checked with numbers, now."""

from wellposed_lab.papers.audit._finding import Evidence, Fact, Finding, Row
from wellposed_lab.papers.audit.registry import FINDINGS, audit
from wellposed_lab.papers.audit.report import to_html, to_json

__all__ = ["FINDINGS", "Evidence", "Fact", "Finding", "Row", "audit", "to_html", "to_json"]
