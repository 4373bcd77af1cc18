"""Data sets of the Hugging Face hub, through `datasets`: by name, by alias, or as a directory that was downloaded.

    verified                        an alias, with the split it is published under
    SWE-bench/SWE-smith             the `train` split, or the one of --hub-split
    SWE-bench/SWE-smith@REVISION    a commit, branch or tag; what was read is in the report either way

Rows come as Arrow batches, from the cache's memory map or (`stream`) from the network, never as a whole. Where the hub
cannot be reached and nothing is cached, one sentence says so and names --input; nothing is ever uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipeline.files import BATCH_ROWS, Raw, Source, rows_of
from swe_lightning.errors import DataError, MissingPart

ALIASES = {
    "smith": ("SWE-bench/SWE-smith", "train"),
    "verified": ("SWE-bench/SWE-bench_Verified", "test"),
    "lite": ("SWE-bench/SWE-bench_Lite", "test"),
    "full": ("SWE-bench/SWE-bench", "test"),
    "multilingual": ("SWE-bench/SWE-bench_Multilingual", "test"),
    "multimodal": ("SWE-bench/SWE-bench_Multimodal", "dev"),
}
"""Short name -> data set and the split that holds its tasks."""
_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")


def is_hub_name(name: str) -> bool:
    return name in ALIASES or _NAME.fullmatch(name) is not None


def open_hub(name: str, split: str | None = None, *, stream: bool = False) -> Source:
    """A data set by alias or OWNER/NAME[@REVISION]. DataError if it is neither reachable nor cached."""
    if name in ALIASES:
        path, default = ALIASES[name]
        return _open(name, path, split or default, None, stream)
    found = _NAME.fullmatch(name)
    assert found is not None
    published = {path: default for path, default in ALIASES.values()}
    return _open(name, found[1], split or published.get(found[1], "train"), found[2], stream)


def open_directory(path: Path, split: str | None = None, *, stream: bool = False) -> Source:
    """A downloaded data set (`hf download --repo-type dataset`), or one written by `save_to_disk`."""
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        with _faults(str(path), split or "all rows"):
            loaded = _datasets().load_from_disk(str(path))
        return Source(str(path), lambda: _rows(loaded), folder=path.absolute())
    return _open(str(path), str(path.absolute()), split or "train", None, stream)


def holds_data_set(path: Path) -> bool:
    if (path / "state.json").is_file():
        return True
    return any(next(path.glob(pattern), None) for pattern in ("*.parquet", "data/*.parquet", "*/*.parquet"))


def _open(name: str, path: str, split: str, revision: str | None, stream: bool) -> Source:
    datasets = _datasets()
    folder = Path(path) if Path(path).is_dir() else None
    with _faults(name, split):
        if stream and folder is None:
            revision = _commit(path, revision)
        loaded = datasets.load_dataset(path, split=split, revision=revision, streaming=stream)
    described = {"data_set": path, "split": split, "revision": _revision(loaded) or revision}
    return Source(name, lambda: _rows(loaded), described=described, folder=folder)


def _rows(loaded: Any) -> Iterator[Raw]:
    number = 0
    for table in loaded.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for row in rows_of(table):
            number += 1
            yield Raw(number, row)


def _commit(path: str, revision: str | None) -> str | None:
    """What the name stands for now. A stream is read for as long as the filter runs, so it is pinned to one commit."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(path, revision=revision, timeout=30).sha


def _revision(loaded: Any) -> str | None:
    """The commit that was read, where `datasets` tells: in the names of what it cached or opened."""
    places = [str(file.get("filename")) for file in getattr(loaded, "cache_files", None) or ()]
    places += [str(url) for url in getattr(getattr(loaded, "info", None), "download_checksums", None) or ()]
    found = (re.search(r"[/@]([0-9a-f]{40})/", place) for place in places)
    return next((match[1] for match in found if match), None)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingPart("data sets of the hub need `datasets`; pip install 'swe-lightning[swe]'") from error
    return datasets


@contextmanager
def _faults(name: str, split: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, ValueError) and "split" in reason.lower():
            raise DataError(f"{name} has no split {split}; say which with --hub-split ({reason})") from error
        raise DataError(
            f"cannot load {name} (split {split}): it is neither reachable nor cached here ({reason}); "
            "download it where there is a network and give the file or directory with --input"
        ) from error
