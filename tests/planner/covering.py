"""Few rows of a full product in which every combination of ``strength`` settings occurs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering_rows(factors: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Rows of the product of ``factors``, by taking the row that shows most that is new."""
    places = list(combinations(range(len(factors)), strength))
    shown = {
        row: {(place, *(row[i] for i in place)) for place in places} for row in product(*factors)
    }
    missing = set().union(*shown.values())
    chosen: list[tuple[Any, ...]] = []
    while missing:
        row = max(shown, key=lambda candidate: len(shown[candidate] & missing))
        chosen.append(row)
        missing -= shown.pop(row)
    return chosen
