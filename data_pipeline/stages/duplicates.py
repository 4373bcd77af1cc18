"""Issue texts that occur twice: the same words, or nearly the same.

Two texts are near duplicates if they share at least 90 % of their five-word shingles (Jaccard). Candidates come from
MinHash with banding, so a set of 60,000 rows is compared in seconds, and each candidate is then counted exactly: a row
never leaves because of an estimate. The earlier row stays; a row is compared only with rows that stay.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Row = Mapping[str, Any]
SHINGLE_WORDS = 5
THRESHOLD = 0.9
BANDS, ROWS_PER_BAND = 16, 4
"""A pair at the threshold is missed with probability 1e-7: (1 - 0.9^4)^16; one at 0.5 is compared in vain in 64 %."""
DIGEST_BYTES = 16
WORDS_HASHED_TO = 256
"""Letters of a word that are told apart by their place; beyond it places repeat."""
_NO_WORD = re.compile(r"\W+")
_IN_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_" for byte in range(256)])
_random = np.random.default_rng(59_136)
_FACTORS = _random.integers(0, 2**31, size=(BANDS * ROWS_PER_BAND, 1), dtype=np.uint32) * np.uint32(2) + np.uint32(1)
_FLIPS = _random.integers(0, 2**32, size=(BANDS * ROWS_PER_BAND, 1), dtype=np.uint32)
_PLACES = _random.integers(0, 2**63, size=WORDS_HASHED_TO, dtype=np.uint64) << np.uint64(1) | np.uint64(1)
_MIX = _random.integers(0, 2**63, size=SHINGLE_WORDS, dtype=np.uint64) << np.uint64(1) | np.uint64(1)


def shingles(text: str) -> np.ndarray:
    """Hashes of the distinct runs of five words, sorted, (shingles,); a shorter text is one shingle."""
    hashes = _words(text)
    count = max(len(hashes) - SHINGLE_WORDS + 1, 1)
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(min(SHINGLE_WORDS, len(hashes))):
        mixed += hashes[place : place + count] * _MIX[place]
    mixed = np.sort(_scatter(mixed))
    return mixed[np.concatenate(([True], mixed[1:] != mixed[:-1]))]


def _words(text: str) -> np.ndarray:
    """A hash of each word, (words,), without touching the words one by one in Python."""
    text = text.lower()
    if not text.isascii():
        text = _NO_WORD.sub(" ", text)
    letters = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    inside = _IN_WORD[letters]
    first = inside.copy()
    first[1:] &= ~inside[:-1]
    starts = np.flatnonzero(first)
    if not len(starts):
        return np.zeros(1, dtype=np.uint64)
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = len(letters) - starts[-1]
    place = (np.arange(starts[0], len(letters)) - np.repeat(starts, lengths)) % WORDS_HASHED_TO
    values = (letters[starts[0] :] + np.uint64(1)) * _PLACES[place] * inside[starts[0] :]
    return _scatter(np.add.reduceat(values, starts - starts[0]))


def _scatter(values: np.ndarray) -> np.ndarray:
    """Sums of products are no hashes yet: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sketch(text: str) -> bytes:
    """All that is remembered of a text: a digest of its shingles, then MinHashes (BANDS x ROWS_PER_BAND uint32)."""
    found = shingles(text)
    permuted = found.astype(np.uint32) ^ _FLIPS
    permuted *= _FACTORS
    least = permuted.min(axis=1)
    return hashlib.blake2b(found.tobytes(), digest_size=DIGEST_BYTES).digest() + least.tobytes()


def _bands(sketched: bytes) -> list[bytes]:
    """One key per band; two texts with a key in common are candidates."""
    size = 4 * ROWS_PER_BAND
    return [sketched[start : start + size] for start in range(DIGEST_BYTES, len(sketched), size)]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def duplicate_issues(
    rows: Sequence[Row], text_of: Callable[[Row], str], advance: Callable[[], Any] = lambda: None
) -> dict[int, tuple[str, str]]:
    """Rows to take out: {index: (reason, evidence)}. `text_of` reads the text of rows without `sketch`, and of those
    that have to be compared; texts are not kept."""
    rejected: dict[int, tuple[str, str]] = {}
    same: dict[bytes, int] = {}
    bands: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(BANDS)]

    @lru_cache(maxsize=256)
    def of(index: int) -> np.ndarray:
        return shingles(text_of(rows[index]))

    for index, row in enumerate(rows):
        advance()
        sketched = row.get("sketch") or sketch(text_of(row))
        first = same.setdefault(sketched[:DIGEST_BYTES], index)
        if first != index:
            rejected[index] = ("duplicate_issue", f"the issue text of {rows[first]['instance_id']}")
            continue
        keys = list(zip(bands, _bands(sketched), strict=True))
        near = _nearest(index, {n for band, key in keys if key in band for n in band[key]}, of)
        if near is not None:
            other, share = near
            rejected[index] = ("near_duplicate_issue", f"{share:.0%} the issue text of {rows[other]['instance_id']}")
            continue
        for band, key in keys:
            band[key].append(index)
    return rejected


def _nearest(index: int, candidates: set[int], of: Callable[[int], np.ndarray]) -> tuple[int, float] | None:
    """The first kept row at or above the threshold."""
    for other in sorted(candidates):
        sizes = sorted((len(of(index)), len(of(other))))
        if sizes[0] >= THRESHOLD * sizes[1] and (share := jaccard(of(index), of(other))) >= THRESHOLD:
            return other, share
    return None
