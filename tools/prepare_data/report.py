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
            "without_targets": self.without_targets,
            "dropped_overlong": self.dropped_overlong,
            "truncated": self.truncated,
            "split": self.split,
            "documents": self.documents,
            "length_percentiles": percentiles(self.lengths),
        }

    def lines(self) -> list[str]:
        notes = [
            f"{count} {what}"
            for count, what in (
                (self.bad, "unusable, left out"),
                (self.without_targets, "without a target, dropped"),
                (self.dropped_overlong, "overlong, dropped"),
                (self.truncated, "overlong, truncated"),
                (self.split, "overlong, split"),
            )
            if count
        ]
        lines = [f"{self.name}: {self.records} records, {self.documents} documents" + "".join(f"; {n}" for n in notes)]
        lines += [f"  {example}" for example in self.examples]
        if self.bad > len(self.examples):
            lines.append(f"  and {self.bad - len(self.examples)} more")
        if self.lengths:
            shares = ", ".join(f"{_name(p)} {length}" for p, length in percentiles(self.lengths).items())
            lines.append(f"  tokens of a record: {shares}")
        return lines


def percentiles(lengths: Sequence[int]) -> dict:
    """{percent: the smallest length that so many of a hundred do not exceed}; empty for no lengths."""
    ordered = sorted(lengths)
    return {str(p): ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES} if ordered else {}


def _name(percent: str) -> str:
    return {"0": "shortest", "100": "longest"}.get(percent, f"{percent}%")
