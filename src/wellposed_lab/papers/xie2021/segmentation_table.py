"""The table of docs/tasks/segmentation.md, from the record of [xie2021, Table 2]."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from wellposed_lab.papers.experiment import values_of
from wellposed_lab.papers.record import Record
from wellposed_lab.papers.xie2021.table2 import MEASURES, NETWORKS

__all__ = ["segmentation_table"]

NAME = "xie2021/table2"


def segmentation_table(records: Mapping[str, Record]) -> str:
    """Networks with parameters and measures: mean and standard error over seeds, in percent."""
    record = records.get(NAME)
    if record is None:
        return f"No run is stored yet. `wellposed reproduce {NAME} --store` makes one, and `make gallery` the\ntable.\n"
    config = record.config
    n, n_test, data = config["images"], config["test_images"], config["data"]
    lines = [
        f"Size: {record.size}. {n} images of {data} to train and {n_test} to test, {config['epochs']} epochs.\n",
        "| network | parameters | seeds | mIoU | mAcc | aAcc | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for network in NETWORKS:
        sizes = values_of(record.results, "parameters", network=network)
        if not sizes:
            continue
        measured = [_mean_and_error(values_of(record.results, measure, network=network)) for measure in MEASURES]
        seconds = statistics.mean(r.seconds for r in record.results if r.task["network"] == network)
        lines.append("| " + " | ".join([network, f"{sizes[0]:,}", str(len(sizes)), *measured, f"{seconds:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def _mean_and_error(values: Sequence[float]) -> str:
    """In percent; without an error if there is one value."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"
