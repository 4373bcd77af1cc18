"""A source tree in memory: path -> entry. What an sdist, a git commit and a mutated package have in common.

Every path is relative, normalised and stays inside the tree; a tar archive that says otherwise (absolute names, `..`,
links that lead out, devices) is refused, never repaired. Nothing here executes what it reads.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from swe_lightning.errors import DataError

MAX_FILES = 20_000
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A file (`mode` 100644 or 100755) or a symbolic link (120000; `data` is its target)."""

    data: bytes
    mode: str = "100644"


Tree = dict[str, Entry]


def tree_digest(tree: Tree) -> str:
    """Hex digest of names, modes and contents: two trees with one digest are the same tree."""
    digest = hashlib.sha256()
    for path in sorted(tree):
        entry = tree[path]
        content = hashlib.sha256(entry.data).hexdigest()
        digest.update(f"{entry.mode} {content} {path}\n".encode())
    return digest.hexdigest()


def read_tar(data: bytes, where: str, *, strip_top: bool = False) -> Tree:
    """Files of a tar archive (plain or compressed). DataError names the member that may not be unpacked."""
    tree: Tree = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.isdir() or member.type == tarfile.XGLTYPE:
                    continue
                path = _safe_path(member.name, where, strip_top)
                if path is None:
                    continue
                if member.issym():
                    tree[path] = Entry(_safe_link(path, member.linkname, where), "120000")
                    continue
                if not member.isreg():
                    raise DataError(f"{where}: member {member.name!r} is neither a file nor a plain link; refused")
                total += member.size
                if total > MAX_BYTES or len(tree) >= MAX_FILES:
                    raise DataError(f"{where} unpacks to more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB; refused")
                stream = archive.extractfile(member)
                assert stream is not None
                tree[path] = Entry(stream.read(), "100755" if member.mode & 0o100 else "100644")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{where} is not a readable tar archive: {error}") from error
    if not tree:
        raise DataError(f"{where} holds no files")
    return tree


def commit_of(repository: Path, revision: str = "HEAD") -> str:
    """Full hash of the commit that a revision (branch, tag, hash) names."""
    command = ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", "--end-of-options"]
    done = subprocess.run([*command, f"{revision}^{{commit}}"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise DataError(f"{repository} has no readable git commit {revision}" + (f": {reason[-1]}" if reason else ""))
    return done.stdout.strip()


def read_git(repository: Path, revision: str = "HEAD") -> Tree:
    """The committed files of a local git repository, uncommitted changes left out."""
    command = ["git", "-C", str(repository), "archive", "--format=tar", revision]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise DataError(f"{repository} has no readable git commit {revision}: {reason[-1] if reason else 'git failed'}")
    return read_tar(done.stdout, str(repository))


def write_tree(tree: Tree, target: Path) -> Path:
    """Write to `target` unless it exists; another process doing the same at once is harmless."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tree-") as scratch:
        root = Path(scratch) / "tree"
        root.mkdir()
        for path, entry in tree.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if entry.mode == "120000":
                file.symlink_to(entry.data.decode())
            else:
                file.write_bytes(entry.data)
                file.chmod(0o755 if entry.mode == "100755" else 0o644)
        try:
            root.rename(target)
        except OSError:
            if not target.exists():
                raise
    return target


def _safe_path(name: str, where: str, strip_top: bool) -> str | None:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise DataError(f"{where}: member {name!r} would leave the directory it is unpacked into; refused")
    parts = [p for p in parts if p not in ("", ".")]
    if strip_top:
        parts = parts[1:]
    if not parts or ".git" in parts:
        return None
    return "/".join(parts)


def _safe_link(path: str, target: str, where: str) -> bytes:
    landing = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if target.startswith("/") or landing == ".." or landing.startswith("../"):
        raise DataError(f"{where}: link {path!r} leads outside the tree ({target!r}); refused")
    return target.encode()
