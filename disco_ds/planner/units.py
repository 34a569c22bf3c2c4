"""Sizes and rates as people write them: 40GiB, 25GB/s, 200Gbit/s, 312T."""

from __future__ import annotations

import math
import re

GIB = 2**30
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"


def parse_bytes(text: str, flag: str, *, lowest: int = 1) -> int:
    """Bytes of ``40GiB``, ``80GB`` or ``40536MiB``.

    Raises:
        ValueError: no number with a unit of bytes, or below ``lowest``; names the flag.
    """
    found = re.fullmatch(_NUMBER + r"((?:[KMGT]i?)?)B", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{flag} {text}: give a size with its unit, such as 40GiB or 80GB")
    return _value(found, text, flag, lowest)


def parse_rate(text: str, flag: str) -> float:
    """Bytes per second of ``25GB/s``, ``300GB/s`` or ``200Gbit/s``.

    Raises:
        ValueError: no rate, or not positive; names the flag.
    """
    found = re.fullmatch(_NUMBER + r"((?:[kmgtKMGT]i?)?)(B|bit|b)(?:/s|ps)", text)
    if found is None:
        raise ValueError(f"{flag} {text}: give a rate with its unit, such as 25GB/s or 200Gbit/s")
    return _value(found, text, flag) / (1 if found[3] == "B" else 8)


def parse_flops(text: str, flag: str) -> float:
    """Operations per second of ``312T``, ``312TFLOPS`` or ``1e15``.

    Raises:
        ValueError: not a number, or not positive; names the flag.
    """
    found = re.fullmatch(_NUMBER + r"([KMGTP]?)(?:FLOPS?|FLOP/s)?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{flag} {text}: give operations per second, such as 312T")
    return _value(found, text, flag)


def _value(found: re.Match[str], text: str, flag: str, lowest: int = 1) -> int:
    prefix = found[2][:1].upper() + found[2][1:].lower()
    value = float(found[1]) * (_BINARY | _DECIMAL)[prefix]
    if not lowest <= value < math.inf:
        raise ValueError(f"{flag} {text}: must be at least {lowest} and finite")
    return int(value)


def gib(value: float) -> str:
    """Bytes as GiB with two digits (three below 0.1)."""
    size = value / GIB
    return f"{size:.2f}" if abs(size) >= 0.1 or size == 0 else f"{size:.3f}"


def short_bytes(value: float) -> str:
    """Bytes with the unit that fits, decimal as links are."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
