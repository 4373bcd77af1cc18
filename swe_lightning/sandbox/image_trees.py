"""Trees of tasks whose repository lies in an image: its history is read here, on the trusted side, and stays here.

Once per image (by its id) the objects and references of `/testbed/.git` become a bare repository under `home()`, with a
configuration of ours: hooks, aliases and alternates of the image are left behind. Commits are found by branch, never by
a hash out of the image's name. From the rest of `/testbed` only what a build made and an import needs is kept (compiled
modules, metadata, version files); bytecode, build directories and generated sources hold the fix and are not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from swe_lightning import paths
from swe_lightning.errors import DataError, SandboxStartError
from swe_lightning.locks import once
from swe_lightning.sandbox.base import TREE_ROOT
from swe_lightning.sandbox.docker_engine import OWNER, connect, find_image, short
from swe_lightning.sandbox.owners import owner_stamp

if TYPE_CHECKING:
    import docker

GIT_PARTS = re.compile(r"HEAD|packed-refs|shallow|refs/.+|objects/([0-9a-f]{2}|pack)/[^/]+")
BUILT = re.compile(r"(^|.*/)([^/]+\.(egg|dist)-info/.+|[^/]+\.(so|pyd|egg-link)|_?version\.py)")
NOT_BUILT = re.compile(
    r"(^|.*/)(__pycache__|build|dist|\.eggs|\.tox|\.venv|venv|node_modules|\.git)(/.*|$)|.*\.py[co]$"
)
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n"


@dataclass(frozen=True)
class Checkout:
    """What an image holds of its task's repository."""

    repository: Path
    """Bare; every branch, local or of a remote, is in refs/heads."""
    built: Path
    """Files beside the tracked ones that imports need."""
    key: str


def checkout(image: str) -> Checkout:
    """SandboxStartError(image_unavailable) if the image is not here; DataError if it holds no repository."""
    client = connect()
    try:
        info = find_image(client, image)
        key = info["Id"].removeprefix("sha256:")[:16]
        place = paths.home() / "checkouts"
        place.mkdir(exist_ok=True)
        target = place / key
        with once(place, key):
            if not target.is_dir():
                temporary = Path(tempfile.mkdtemp(dir=place, prefix=".new-"))
                try:
                    _take(client, info["Id"], image, temporary)
                    os.rename(temporary, target)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        os.utime(target)  # pruning removes what was used least recently
        return Checkout(target / "repository", target / "built", key)
    finally:
        client.close()


def branches(image: str) -> set[str]:
    """Names of all branches in the image's repository, local ones and those of its remotes. Remembered by image id."""
    client = connect()
    try:
        info = find_image(client, image)
        place = paths.home() / "image-branches"
        place.mkdir(exist_ok=True)
        file = place / f"{info['Id'].removeprefix('sha256:')[:16]}.json"
        if not file.exists():
            references: dict[str, str] = {}
            with _container(client, info["Id"]) as container:
                for part in ("packed-refs", "refs"):
                    for name, data in _files(client, container, f"{TREE_ROOT}/.git/{part}", image):
                        _read_references(name if part == "refs" else part, data, references)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(sorted(_heads(references))))
            temporary.rename(file)
        return set(json.loads(file.read_text()))
    finally:
        client.close()


def _take(client: docker.APIClient, image_id: str, image: str, target: Path) -> None:
    repository, built = target / "repository", target / "built"
    repository.mkdir()
    built.mkdir()
    references: dict[str, str] = {}
    with _container(client, image_id) as container:
        for name, data in _files(client, container, TREE_ROOT, image):
            inside = name.partition("/")[2]
            git = inside.removeprefix(".git/")
            if git != inside:
                if GIT_PARTS.fullmatch(git) and not _read_references(git, data, references):
                    _write(repository / git, data)
            elif BUILT.fullmatch(inside) and not NOT_BUILT.fullmatch(inside):
                _write(built / inside, data)
    if not references:
        raise DataError(f"image {image} holds no git repository at {TREE_ROOT}")
    heads = {f"refs/heads/{name}": value for name, value in _heads(references).items()}
    (repository / "config").write_text(CONFIG)
    (repository / "packed-refs").write_text("".join(f"{v} {n}\n" for n, v in sorted(heads.items())))
    (repository / "refs/heads").mkdir(parents=True, exist_ok=True)
    (repository / "objects").mkdir(exist_ok=True)
    head = references.get("HEAD", "")
    (repository / "HEAD").write_text(
        (head if re.fullmatch(r"[0-9a-f]{40,64}", head) else "ref: refs/heads/main") + "\n"
    )
    for name in _tracked(repository):
        (built / name).unlink(missing_ok=True)


def _tracked(repository: Path) -> list[str]:
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    argv = ["git", "-c", "safe.directory=*", "-C", str(repository), "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    done = subprocess.run(argv, capture_output=True, env=env, check=False)
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _read_references(name: str, data: bytes, into: dict[str, str]) -> bool:
    """Whether this file of .git was one of references (or HEAD)."""
    text = data.decode(errors="replace")
    if name == "packed-refs":
        for line in text.splitlines():
            value, _, reference = line.partition(" ")
            if reference and re.fullmatch(r"[0-9a-f]{40,64}", value):
                into.setdefault(reference.strip(), value)
    elif name == "HEAD" or name.startswith("refs/"):
        into[name] = text.strip()  # a loose reference is newer than a packed one
    else:
        return False
    return True


def _heads(references: dict[str, str]) -> dict[str, str]:
    """Branch -> commit; a branch of the image's own wins over that of a remote."""
    found: dict[str, str] = {}
    for reference, value in references.items():
        kind = reference.split("/")
        if kind[:2] == ["refs", "remotes"] and len(kind) > 3 and kind[3] != "HEAD":
            found.setdefault("/".join(kind[3:]), value)
    for reference, value in references.items():
        if reference.startswith("refs/heads/"):
            found[reference.removeprefix("refs/heads/")] = value
    return {name: value for name, value in found.items() if re.fullmatch(r"[0-9a-f]{40,64}", value)}


@contextlib.contextmanager
def _container(client: docker.APIClient, image_id: str) -> Iterator[str]:
    """One that is never started: nothing of the image runs."""
    container = client.create_container(
        image_id, ["true"], entrypoint=[], network_disabled=True, labels={OWNER: owner_stamp()}
    )["Id"]
    try:
        yield container
    finally:
        client.remove_container(container, force=True)


def _files(client: docker.APIClient, container: str, path: str, image: str) -> Iterator[tuple[str, bytes]]:
    """(path below the parent of `path`, content) of all regular files there. Names that climb are refused."""
    import docker.errors

    try:
        chunks, _ = client.get_archive(container, path)
    except docker.errors.NotFound:
        if path == TREE_ROOT:
            raise DataError(f"image {image} has no {TREE_ROOT}") from None
        return
    except docker.errors.APIError as error:
        raise SandboxStartError(f"image {image} cannot be read: {short(error)}") from error
    with tarfile.open(fileobj=_Stream(chunks), mode="r|") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if not member.isreg() or ".." in parts or member.name.startswith("/"):
                continue
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, content.read()


class _Stream(io.RawIOBase):
    """The daemon's chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def read(self, n: int = -1) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while n < 0 or have < n:
            part = next(self._chunks, b"")
            if not part:
                break
            parts.append(part)
            have += len(part)
        data = b"".join(parts)
        self._rest = data[n:] if n >= 0 else b""
        return data[:n] if n >= 0 else data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
