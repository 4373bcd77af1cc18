"""Issue texts that occur twice: the same words, or nearly the same.

Two texts are near duplicates if they share at least 90 % of their five-word shingles (Jaccard). Candidates come from
MinHash with banding, so a set of 60,000 rows is compared in seconds, and each candidate is then counted exactly: a row
never leaves because of an estimate. The earlier row stays; a row is compared only with rows that stay.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
SHINGLE_WORDS = 5
THRESHOLD = 0.9
BANDS, ROWS_PER_BAND = 16, 4
"""A pair at the threshold is missed with probability 1e-7: (1 - 0.9^4)^16; one at 0.5 is compared in vain in 64 %."""
_WORD = re.compile(r"\w+")
_MIX = np.array([(0x9E3779B97F4A7C15 * (n + 1) | 1) & (2**64 - 1) for n in range(SHINGLE_WORDS)], dtype=np.uint64)
_random = np.random.default_rng(59_136)
_FACTORS = (_random.integers(1, 2**63, size=(BANDS * ROWS_PER_BAND, 1), dtype=np.uint64) << np.uint64(1)) | np.uint64(1)
_OFFSETS = _random.integers(0, 2**63, size=(BANDS * ROWS_PER_BAND, 1), dtype=np.uint64)


def shingles(text: str) -> np.ndarray:
    """Hashes of the distinct runs of five words, sorted, (shingles,); a shorter text is one shingle."""
    words = [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text.lower())]
    hashes = np.array(words or [0], dtype=np.uint64)
    count = max(len(hashes) - SHINGLE_WORDS + 1, 1)
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(min(SHINGLE_WORDS, len(hashes))):
        mixed += (hashes[place : place + count] + np.uint64(1)) * _MIX[place]
    mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed * np.uint64(0xBF58476D1CE4E5B9))


def sketch(found: np.ndarray) -> list[bytes]:
    """One key per band; two texts with a key in common are candidates."""
    least = ((found * _FACTORS + _OFFSETS) >> np.uint64(32)).min(axis=1).astype(np.uint32)
    return [least[n : n + ROWS_PER_BAND].tobytes() for n in range(0, len(least), ROWS_PER_BAND)]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def duplicate_issues(
    rows: Sequence[Row], text_of: Callable[[Row], str], advance: Callable[[], Any] = lambda: None
) -> dict[int, tuple[str, str]]:
    """Rows to take out: {index: (reason, evidence)}. `text_of` reads a row's issue text; texts are not kept."""
    rejected: dict[int, tuple[str, str]] = {}
    same: dict[bytes, int] = {}
    bands: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(BANDS)]
    kept: dict[int, np.ndarray] = {}
    for index, row in enumerate(rows):
        advance()
        text = text_of(row)
        found = shingles(text)
        first = same.setdefault(found.tobytes(), index)
        if first != index:
            rejected[index] = ("duplicate_issue", f"the issue text of {rows[first]['instance_id']}")
            continue
        keys = sketch(found)
        near = _nearest(found, {n for band, key in zip(bands, keys, strict=True) for n in band.get(key, ())}, kept)
        if near is not None:
            other, share = near
            rejected[index] = ("near_duplicate_issue", f"{share:.0%} the issue text of {rows[other]['instance_id']}")
            continue
        kept[index] = found
        for band, key in zip(bands, keys, strict=True):
            band[key].append(index)
    return rejected


def _nearest(found: np.ndarray, candidates: set[int], kept: Mapping[int, np.ndarray]) -> tuple[int, float] | None:
    """The first kept row at or above the threshold."""
    for other in sorted(candidates):
        sizes = sorted((len(found), len(kept[other])))
        if sizes[0] >= THRESHOLD * sizes[1] and (share := jaccard(found, kept[other])) >= THRESHOLD:
            return other, share
    return None
