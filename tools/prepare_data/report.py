"""What became of the records of a dataset."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_EXAMPLES = 5  # bad records that are shown


@dataclasses.dataclass
class DatasetReport:
    name: str
    records: int = 0
    bad: int = 0
    without_targets: int = 0
    dropped_overlong: int = 0
    truncated: int = 0
    split: int = 0
    documents: int = 0
    examples: list = dataclasses.field(default_factory=list)  # of bad records: place and cause
    lengths: array = dataclasses.field(default_factory=lambda: array("q"))  # in tokens, before any cut

    def add_bad(self, message: str) -> None:
        self.bad += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(message)

    def figures(self) -> dict:
        return {
            "name": self.name,
            "records": self.records,
            "bad": self.bad,
            "bad_examples": self.examples,
            "without_targets": self.without_targets,
            "dropped_overlong": self.dropped_overlong,
            "truncated": self.truncated,
            "split": self.split,
            "documents": self.documents,
            "length_percentiles": percentiles(self.lengths),
        }


def report_lines(datasets: Sequence[dict], shards: Sequence[dict], output: object) -> list[str]:
    """For people, of what a manifest holds: figures of the datasets, each with the documents of it that the shards
    have as "taken", and of the shards."""
    documents, tokens, targets = (sum(shard[key] for shard in shards) for key in ("documents", "tokens", "targets"))
    told = [line for figures in datasets for line in _dataset_lines(figures)]
    if len(datasets) > 1:
        told += [
            f"{figures['name']}: {figures['taken']} of {documents} documents ({figures['taken'] / documents:.1%})"
            for figures in datasets
        ]
    told.append(
        f"{output}: {documents} documents, {tokens} tokens, {targets} targets ({targets / tokens:.1%}) in "
        f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"
    )
    return told


def _dataset_lines(figures: dict) -> list[str]:
    notes = [
        f"; {figures[key]} {what}"
        for key, what in (
            ("bad", "unusable, left out"),
            ("without_targets", "without a target, dropped"),
            ("dropped_overlong", "overlong, dropped"),
            ("truncated", "overlong, truncated"),
            ("split", "overlong, split"),
        )
        if figures[key]
    ]
    told = [f"{figures['name']}: {figures['records']} records, {figures['documents']} documents{''.join(notes)}"]
    told += [f"  {example}" for example in figures["bad_examples"]]
    if figures["bad"] > len(figures["bad_examples"]):
        told.append(f"  and {figures['bad'] - len(figures['bad_examples'])} more")
    if figures["length_percentiles"]:
        shares = ", ".join(f"{_name(p)} {length}" for p, length in figures["length_percentiles"].items())
        told.append(f"  tokens of a record: {shares}")
    return told


def percentiles(lengths: Sequence[int]) -> dict:
    """{percent: the smallest length that so many of a hundred do not exceed}; empty for no lengths."""
    ordered = sorted(lengths)
    return {str(p): ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES} if ordered else {}


def _name(percent: str) -> str:
    return {"0": "shortest", "100": "longest"}.get(percent, f"{percent}%")
