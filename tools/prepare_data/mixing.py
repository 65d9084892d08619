"""In which order the documents of several datasets follow each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

CONCAT, FIRST_EXHAUSTED, ALL_EXHAUSTED = STRATEGIES = ("concat", "interleave_under", "interleave_over")


def mix(counts: Sequence[int], strategy: str, probabilities: Sequence[float] | None, seed: int) -> list:
    """[(dataset, document of it)], the same for the same arguments. Interleaving draws each document's dataset with
    its probability (equal ones if None) and takes the next of its documents. interleave_under ends when a dataset
    is drawn that has none left; in interleave_over it begins anew, until each has been gone through once.

    @pre without concat: counts and probabilities are positive, probabilities need not add up to 1."""
    if strategy == CONCAT:
        return [(dataset, document) for dataset, count in enumerate(counts) for document in range(count)]
    datasets = range(len(counts))
    generator = random.Random(seed)
    taken, order, unfinished = [0] * len(counts), [], set(datasets)
    while True:
        (dataset,) = generator.choices(datasets, probabilities)
        if strategy == FIRST_EXHAUSTED and taken[dataset] == counts[dataset]:
            return order
        order.append((dataset, taken[dataset] % counts[dataset]))
        taken[dataset] += 1
        if taken[dataset] == counts[dataset]:
            unfinished.discard(dataset)
        if strategy == ALL_EXHAUSTED and not unfinished:
            return order
