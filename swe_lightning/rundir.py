"""A run is a directory; everything a run knows lies in it.

    recipe.yaml          the resolved recipe; resuming refuses a changed one and names the key
    metrics.jsonl        one line per step, append-only
    gateway.db           the store: rollouts, calls, events (or a PostgreSQL database, named in gateway.json)
    gateway.json         what its gateway last served: url, pid, and the store if that is a database
    keys/                signing key (0600)
    checkpoints/stepN/   Hugging Face model + training state
    logs/                one file per process, and per attempt
    lock                 held by the process that trains

Nothing is overwritten silently; files are replaced atomically.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from pydantic import ValidationError

from swe_lightning.errors import BusyError, DataError, RecipeError
from swe_lightning.recipe import Recipe


class RunDir:
    """Paths and small durable files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock_fd: int | None = None

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def store_url(self) -> str:
        """The database that the run's gateway last served, without its password; else SQLite in the run."""
        return self.database or f"sqlite:///{self.path / 'gateway.db'}"

    @property
    def database(self) -> str | None:
        """URL of the PostgreSQL database that holds the run's store; None for one in the directory."""
        try:
            served = json.loads(self.gateway_file.read_bytes())
        except (OSError, ValueError):
            return None
        found = served.get("store") if isinstance(served, dict) else None
        return found if isinstance(found, str) else None

    def remember_served(self, *, store: str | None, **served: Any) -> None:
        """What a gateway serves here; `store`: URL of a database without its password, None for SQLite in the run."""
        write_atomic(self.gateway_file, json.dumps(served | ({"store": store} if store else {})))

    @property
    def gateway_file(self) -> Path:
        return self.path / "gateway.json"

    @property
    def key_file(self) -> Path:
        return self.path / "keys" / "signing.key"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step{step}"

    def saved_steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending. A directory counts once its `complete` marker exists."""
        found = [
            int(p.name[4:])
            for p in self.checkpoints.glob("step*")
            if p.name[4:].isdigit() and (p / "complete").exists()
        ]
        return sorted(found)

    def open(self, recipe: Recipe, *, allowed_changes: tuple[str, ...] = ("training.steps",)) -> bool:
        """Create the directory, or check that it belongs to the same recipe. True = resuming."""
        try:
            for d in (self.path, self.logs, self.checkpoints, self.key_file.parent):
                d.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot create run directory {self.path}: {error.strerror}") from error
        self.key_file.parent.chmod(0o700)
        resolved = recipe.model_dump(mode="json")
        if not self.recipe_file.exists():
            if self.metrics_file.exists() or self.saved_steps():
                raise DataError(f"{self.path} holds a run without recipe.yaml; choose another --run directory")
            write_atomic(self.recipe_file, yaml.safe_dump(resolved, sort_keys=False))
            return False
        before = self._saved_recipe()
        changed = [k for k in _differences(before, resolved) if k not in allowed_changes]
        if changed:
            raise RecipeError(
                f"{self.path} was started with another recipe; changed: {', '.join(changed)}. "
                "Use the old values or another --run directory"
            )
        write_atomic(self.recipe_file, yaml.safe_dump(resolved, sort_keys=False))
        return True

    def _saved_recipe(self) -> dict[str, Any]:
        """The recipe the run was started with, as this version reads it: keys that came later have their defaults.

        One that this version refuses is given as it was written, so that the comparison names what is different.
        """
        try:
            before = yaml.safe_load(self.recipe_file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"{self.recipe_file} is damaged: {' '.join(str(error).split())}") from error
        if not isinstance(before, dict):
            raise DataError(f"{self.recipe_file} is damaged: it holds no recipe; choose another --run directory")
        try:
            return Recipe.model_validate(before).model_dump(mode="json")
        except ValidationError:
            return before

    def lock(self) -> None:
        """Take the run for this process; BusyError if another one trains in it. Creates the directory."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot create run directory {self.path}: {error.strerror}") from error
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise BusyError(f"{self.path} is in use by process {holder}; wait for it or choose another --run") from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._lock_fd = fd

    def unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append one line and fsync it: what is reported stays. A torn line before it is closed, not continued."""
        with self.metrics_file.open("a+b") as f:
            if f.tell() and self._last_byte(f) != b"\n":
                f.write(b"\n")
            f.write(json.dumps(record).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())

    @staticmethod
    def _last_byte(file: BinaryIO) -> bytes:
        file.seek(-1, os.SEEK_END)
        return file.read(1)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics.jsonl; lines torn by a crash while writing are left out."""
        if not self.metrics_file.exists():
            return
        for line in self.metrics_file.read_bytes().split(b"\n"):
            if line:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue


def write_atomic(path: Path, text: str | bytes) -> None:
    """Write beside the target, fsync, rename: readers see the old file or the new one."""
    data = text.encode() if isinstance(text, str) else text
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in sorted(set(a) | set(b)):
            found += _differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else key)
        return found
    return [] if a == b else [prefix]
