"""All findings, in the order of the page, and the run over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed_lab.papers.audit import holding
from wellposed_lab.papers.audit._finding import Finding, Row
from wellposed_lab.papers.gao2022 import audit as gao2022
from wellposed_lab.papers.gao2023 import audit as gao2023
from wellposed_lab.papers.gao2023 import audit_generalization as gao2023_generalization
from wellposed_lab.papers.ling2022 import audit as ling2022
from wellposed_lab.papers.nguyen2022 import audit_kernel as nguyen2022_kernel
from wellposed_lab.papers.nguyen2022 import audit_training as nguyen2022_training
from wellposed_lab.papers.xie2021 import audit as xie2021

__all__ = ["FINDINGS", "PAPERS", "audit"]

#: What differs from the print comes first, then what holds.
FINDINGS: tuple[Finding, ...] = tuple(
    finding
    for paper in (
        nguyen2022_kernel.PAPER,
        nguyen2022_training.PAPER,
        xie2021.PAPER,
        ling2022.PAPER,
        gao2022.PAPER,
        gao2023.PAPER,
        gao2023_generalization.PAPER,
        *holding.PAPERS,
    )
    for finding in paper.findings
)
PAPERS = ("nguyen2022", "xie2021", "ling2022", "gao2022", "gao2023")


def audit(
    papers: Iterable[str] = (), *, listener: Callable[[Finding], None] | None = None, differing: bool = False
) -> list[Row]:
    """Runs the checks and gives the rows of the table, paper by paper.

    Args:
        papers: Keys; all if none is given.
        listener: Is told each finding before its check runs.
        differing: Leave out what holds as printed.
    """
    chosen = tuple(papers) or PAPERS
    for key in chosen:
        if key not in PAPERS:
            raise InvalidArgument(f"Unknown paper {key!r}; known are {', '.join(PAPERS)}.{did_you_mean(key, PAPERS)}")
    rows = []
    for finding in sorted(FINDINGS, key=lambda finding: PAPERS.index(finding.paper)):
        if finding.paper in chosen and not (differing and finding.verdict == "holds"):
            if listener is not None:
                listener(finding)
            rows.append(finding.run())
    return rows
