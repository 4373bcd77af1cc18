"""Verdicts remembered on disk: one small file each, replaced atomically, shared by worker processes.

Only right where tests are deterministic, so a recipe has to ask for it. Infrastructure failures and time-outs are
never remembered. Workers that want the same verdict at once wait for one run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from swe_lightning.locks import once
from swe_lightning.rundir import write_atomic


class KeyedLock:
    """One thread of this process at a time per key; keys nobody uses take no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def __call__(self, key: str) -> Iterator[None]:
        with self._lock:
            lock, users = self._busy.get(key, (threading.Lock(), 0))
            self._busy[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._busy.pop(key)
                if users > 1:
                    self._busy[key] = (lock, users - 1)


class VerdictMemo:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def once(self, key: str) -> AbstractContextManager[None]:
        return once(self._directory, key)

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._file(key).read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def put(self, key: str, verdict: dict[str, Any]) -> None:
        file = self._file(key)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, json.dumps(verdict))

    def _file(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"
