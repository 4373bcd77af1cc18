"""What `swel doctor` looks at before a run, so that a fault costs seconds and not a night.

Each check is one real try (a call to the model server, a box that runs Python, a database that keeps a transaction) and
ends in one line. A check looks; it repairs nothing and leaves nothing behind.
"""

from __future__ import annotations

import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from swe_lightning.errors import DataError, MissingPart, SwelError
from swe_lightning.recipe import Recipe

FREE_GB = 5
OPEN_FILES = 4096


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def examine(
    recipe: Recipe | None, *, urls: Sequence[str], model: str, run: Path, store_url: str | None = None
) -> list[Check]:
    """All checks, in the order in which a run needs them; none of them stops the others."""
    checks: list[tuple[str, Callable[[], str]]] = [(f"model server {url}", partial(_model, url, model)) for url in urls]
    if recipe is not None:
        checks += [("recipe", lambda: _parts(recipe)), ("tasks", lambda: _tasks(recipe))]
        checks += [("model files", lambda: _model_files(recipe))]
    checks.append(("sandbox", partial(_boxes, recipe)))
    database = store_url or (recipe.store if recipe is not None else None)
    checks += [("store", lambda: _store(run, database)), ("disk", lambda: _disk(run)), ("open files", _open_files)]
    return [_tried(name, check) for name, check in checks]


def _tried(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except (SwelError, OSError) as error:
        return Check(name, False, str(error))


def _model(url: str, model: str) -> str:
    from swe_lightning.gateway.probe import probe_engine

    probe_engine(url, name=model)
    return "answers with prompt ids, response ids and log-probs"


def _parts(recipe: Recipe) -> str:
    from swe_lightning.harness.templates import check_templates
    from swe_lightning.recipe import missing_engine

    check_templates(recipe.harness)
    missing = missing_engine(recipe)
    if missing:
        raise MissingPart(missing)
    return f"{recipe.name}: engine {recipe.training.engine}, sandbox {recipe.sandbox.backend}"


def _tasks(recipe: Recipe) -> str:
    return ", ".join(f"{file} ({_lines(file)} rows)" for file in (recipe.tasks.train, recipe.tasks.val))


def _lines(file: Path) -> int:
    if not file.is_file():
        raise DataError(f"task file {file} is not there; make it with `swel data`, or mend tasks in the recipe")
    with file.open("rb") as f:
        return sum(1 for line in f if line.strip())


def _model_files(recipe: Recipe) -> str:
    path = recipe.model.path
    if path is None:
        return "made by warm_start"
    looks_local = Path(path).is_absolute() or path.startswith((".", "~")) or Path(path).exists()
    if not looks_local:
        return f"{path} comes from the hub when it is needed"
    if not (Path(path).expanduser() / "config.json").is_file():
        raise DataError(f"{path} holds no config.json; model.path names a Hugging Face directory")
    return path


def _sandbox() -> str:
    from swe_lightning.sandbox.check import check_host

    missing = check_host()
    if missing is not None:
        raise missing
    return "a local box runs Python"


def _boxes(recipe: Recipe | None) -> str:
    if recipe is not None and recipe.sandbox.backend == "docker":
        return _docker()
    if recipe is not None and recipe.sandbox.backend == "kubernetes":
        from swe_lightning.sandbox.kubernetes_api import Cluster, said_by

        return said_by(Cluster(recipe.sandbox.kubernetes))
    return _sandbox()


def _docker() -> str:
    from swe_lightning.sandbox.docker_engine import connect

    client = connect()
    try:
        return f"the Docker daemon answers (API {client.api_version})"
    finally:
        client.close()


def _store(run: Path, store_url: str | None) -> str:
    """A transaction on the database itself; for SQLite beside where the store will lie, in WAL mode."""
    if store_url is not None and not store_url.startswith("sqlite"):
        return _database(store_url)
    place = _existing(run)
    with tempfile.TemporaryDirectory(dir=place, prefix=".swel-doctor-") as folder:
        try:
            database = sqlite3.connect(Path(folder) / "probe.db")
            mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            database.execute("CREATE TABLE t (x)")
            database.commit()
            database.close()
        except sqlite3.Error as error:
            raise DataError(f"SQLite cannot write in {place}: {error}; choose another --run") from error
    if mode != "wal":
        raise DataError(f"{place} cannot hold SQLite in WAL mode (a network share?); choose a local disk or --store")
    return f"SQLite (WAL) in {place}"


def _database(url: str) -> str:
    import sqlalchemy as sa

    from swe_lightning.gateway import database

    engine = database.reading_engine(url)
    try:
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT 1"))
    except sa.exc.DBAPIError as error:
        raise DataError(f"the database does not answer: {database.words(error)}") from error
    finally:
        engine.dispose()
    return f"{engine.url.set(query={}).render_as_string()} answers"


def _disk(run: Path) -> str:
    place = _existing(run)
    free = shutil.disk_usage(place).free / 1e9
    if free < FREE_GB:
        raise DataError(f"{place} has {free:.1f} GB free; free some space, {FREE_GB} GB is little enough")
    return f"{free:.0f} GB free at {place}"


def _open_files() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        raise DataError(f"a process may open {hard} files, {OPEN_FILES} are wanted; raise the hard limit (ulimit -Hn)")
    return "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"


def _existing(path: Path) -> Path:
    """The nearest directory above (or at) `path` that exists."""
    places: Iterable[Path] = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if place.is_dir())
