"""Train and validation, seeded and never overlapping.

held_out       whole repositories named by the user, or rows whose `role` column says held_out, are the validation set
repository     whole repositories drawn at random until the size is reached: none of them is trained on
stratified     rows drawn so that each (repository, difficulty) keeps its share
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from swe_lightning.errors import DataError

Mode = Literal["auto", "held_out", "repository", "stratified"]
Row = Mapping[str, Any]
VAL_SIZE = 400


def split_rows(
    rows: Sequence[Row],
    *,
    mode: Mode = "auto",
    val_size: int | None = None,
    seed: int = 0,
    held_out_repos: Collection[str] = (),
    difficulty: Mapping[str, str] | None = None,
) -> tuple[list[Row], list[Row], str]:
    """(train, validation, mode used). Order of the rows is kept. DataError if a side would be empty.

    `auto` is held_out where rows or the user name held-out repositories, else stratified. Without `val_size` the
    validation set has 400 rows, but at most a tenth of them all.
    """
    named = {repo for repo in held_out_repos}
    unknown = named - {name for row in rows for name in _names(row)}
    if unknown:
        raise DataError(f"held-out repository {sorted(unknown)[0]} is not among the rows")
    has_roles = any(row.get("role") == "held_out" for row in rows)
    if mode == "auto":
        mode = "held_out" if named or has_roles else "stratified"
    size = val_size if val_size is not None else min(VAL_SIZE, max(1, len(rows) // 10))
    if mode == "held_out":
        chosen = _held_out(rows, named, val_size, seed)
    elif mode == "repository":
        chosen = _whole_repositories(rows, size, seed)
    else:
        chosen = _stratified(rows, size, seed, difficulty or {})
    train = [row for index, row in enumerate(rows) if index not in chosen and not is_held_out(row, named)]
    val = [row for index, row in enumerate(rows) if index in chosen]
    if not train or not val:
        side = "training" if not train else "validation"
        raise DataError(f"the {mode} split leaves no {side} rows of {len(rows)}; change --val-size or the split")
    return train, val, mode


def _names(row: Row) -> set[str]:
    return {str(row[column]) for column in ("repo", "package") if row.get(column)}


def is_held_out(row: Row, named: Collection[str]) -> bool:
    return row.get("role") == "held_out" or bool(_names(row) & set(named))


def _held_out(rows: Sequence[Row], named: Collection[str], size: int | None, seed: int) -> set[int]:
    chosen = [index for index, row in enumerate(rows) if is_held_out(row, named)]
    if size is not None and len(chosen) > size:
        chosen = random.Random(seed).sample(chosen, size)
    return set(chosen)


def _whole_repositories(rows: Sequence[Row], size: int, seed: int) -> set[int]:
    by_repo: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_repo[row["repo"]].append(index)
    repositories = sorted(by_repo)
    random.Random(seed).shuffle(repositories)
    chosen: set[int] = set()
    for repo in repositories[:-1]:
        if len(chosen) >= size:
            break
        chosen.update(by_repo[repo])
    return chosen


def _stratified(rows: Sequence[Row], size: int, seed: int, difficulty: Mapping[str, str]) -> set[int]:
    """Largest remainders: each stratum gives its share of `size`, rounded so that the sum is exact."""
    strata: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        strata[row["repo"], difficulty.get(row["instance_id"], "")].append(index)
    size = min(size, len(rows) - 1)
    if size <= 0:
        return set()
    rng = random.Random(seed)
    keys = sorted(strata)
    shares = {key: size * len(strata[key]) / len(rows) for key in keys}
    counts = {key: int(shares[key]) for key in keys}
    order = sorted(keys, key=lambda key: (counts[key] - shares[key], rng.random()))
    for key in order[: size - sum(counts.values())]:
        counts[key] += 1
    chosen: set[int] = set()
    for key in keys:
        chosen.update(rng.sample(strata[key], min(counts[key], len(strata[key]))))
    return chosen
