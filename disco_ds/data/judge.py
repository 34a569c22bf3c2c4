"""Decides when data is too bad to go on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

MIN_SAMPLES_TO_JUDGE = 1000
MAX_FRUITLESS_SAMPLES = 10_000


class Judge:
    """Stops a worker that finds hardly anything usable, whether or not it can fill a batch."""

    def __init__(self, *, num_samples: int, captions: Iterable[str], max_bad_share: float) -> None:
        """``num_samples`` of the data set; ``captions``: where they are looked for."""
        self._num_samples = num_samples
        self._captions = ", ".join(captions)
        self._max_bad_share = max_bad_share
        self._num_used = self._num_fruitless = 0
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._names: Counter[str] = Counter()

    def used(self, *, repeated: bool) -> None:
        """A sample went into a batch."""
        self._num_used += 1
        self._num_fruitless = 0
        if not repeated:
            self._counts["seen"] += 1

    def skipped(self, reason: str, names: Iterable[str], *, repeated: bool) -> None:
        """A sample did not; ``names`` are its members'.

        Raises:
            ValueError: nothing was usable for long, or the share of bad samples is too large.
        """
        self._num_fruitless += 1
        self._reasons[reason] += 1
        if self._num_used == 0:
            self._names.update(names)
            limit = min(MAX_FRUITLESS_SAMPLES, self._num_samples)
        else:
            limit = 2 * self._num_samples  # in any order, every sample was among them
        if self._num_fruitless >= limit:
            raise ValueError(
                f"none of {self._num_fruitless} samples can be used "
                f"({_most_common(self._reasons)}); wanted: an image and a caption from "
                f"{self._captions}; members found: {_most_common(self._names)}"
                f"{self._other_captions()}"
            )
        if not repeated:  # else another consumer's share
            self._counts[f"skipped_{reason}"] += 1
            check_bad_share(self._counts, self._max_bad_share)

    def _other_captions(self) -> str:
        """Where img2dataset leaves captions without a ``.txt``."""
        if "json" in self._names and "txt" not in self._names and self._captions == "txt":
            return ". A caption in json: --data.captions json.caption"
        return ""


def check_bad_share(
    counts: Mapping[str, int], limit: float, *, at_least: int = MIN_SAMPLES_TO_JUDGE
) -> None:
    """Judge the counts ``seen`` and ``skipped_<reason>`` once they are enough to tell.

    Raises:
        ValueError: the share of skipped samples is above the limit.
    """
    prefix = "skipped_"
    bad = Counter(
        {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
    )
    total = counts.get("seen", 0) + bad.total()
    if total >= at_least and bad.total() > limit * total:
        raise ValueError(
            f"{bad.total()} of {total} samples had to be skipped ({_most_common(bad)}), more than "
            f"--data.max_bad_share {limit:g} allows; disco-ds validate lists them"
        )


def _most_common(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(8)) or "none"
