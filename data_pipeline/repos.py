"""One git repository per package, one branch per task, in the layout of SWE-smith.

    main            the clean tree
    <instance_id>   main <- "Bug Patch" <- "Remove F2P Tests"

The second commit takes the FAIL_TO_PASS test functions out of their files, so that an agent's tree does not hold the
tests it is judged by. Everything goes through one `git fast-import`, so hundreds of branches take a second; author
and dates are fixed, so the same tree and bugs give the same hashes everywhere. Bare repository, replaced as a whole.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_pipeline.trees import Tree
from swe_lightning.errors import DataError, MissingPart

AUTHOR = "swel data synth <synth@localhost> 1704067200 +0000"
CLEAN = "Clean tree"
_GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}


@dataclass(frozen=True)
class Branch:
    """`bug`: files of the "Bug Patch" commit; `tests`: files of "Remove F2P Tests" (None deletes)."""

    name: str
    bug: Mapping[str, bytes]
    tests: Mapping[str, bytes | None] = field(default_factory=dict)


def build_repository(tree: Tree, branches: Iterable[Branch], target: Path) -> None:
    """Write the bare repository `target`, replaced as a whole; one that already holds exactly this is left alone."""
    stream = b"".join(_stream(tree, branches))
    digest = hashlib.sha256(stream).hexdigest()
    mark = target / "swel-digest"
    if mark.exists() and mark.read_text() == digest:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".repo-") as scratch:
        fresh = Path(scratch) / "repo.git"
        # Without a template: hooks and descriptions differ from machine to machine and help nobody.
        git("init", "-q", "--bare", "--template=", "--initial-branch=main", str(fresh))
        git("fast-import", "--quiet", "--date-format=raw", cwd=fresh, stdin=stream)
        (fresh / mark.name).write_text(digest)
        if target.exists():
            target.rename(Path(scratch) / "old.git")
        fresh.rename(target)


def clean_commit_of(tree: Tree) -> str:
    """Hash of the clean commit that `build_repository` makes, computed as git does; instance ids carry its start."""
    root: dict[str, Any] = {}
    for path, entry in tree.items():
        *folders, name = path.split("/")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = (entry.mode, _object("blob", entry.data))
    text = f"tree {_hash_folder(root).hex()}\nauthor {AUTHOR}\ncommitter {AUTHOR}\n\n{CLEAN}"
    return _object("commit", text.encode()).hex()


def _hash_folder(node: dict[str, Any]) -> bytes:
    """git sorts a folder as if its name ended in a slash."""
    entries = []
    for name, child in node.items():
        if isinstance(child, dict):
            entries.append((f"{name}/".encode(), b"40000", name, _hash_folder(child)))
        else:
            entries.append((name.encode(), child[0].encode(), name, child[1]))
    return _object(
        "tree", b"".join(mode + b" " + name.encode() + b"\0" + sha for _, mode, name, sha in sorted(entries))
    )


def _object(kind: str, data: bytes) -> bytes:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).digest()


def branch_names(repository: Path) -> set[str]:
    """All local branches, asked once per repository."""
    text = git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads", cwd=repository)
    return set(text.split())


def bug_patches(repository: Path, branches: Sequence[str]) -> dict[str, str]:
    """Branch -> unified diff of its "Bug Patch" commit, which introduces the bug (the gold fix is its reverse)."""
    commits = git("rev-parse", *(f"refs/heads/{branch}~1" for branch in branches), cwd=repository).split()
    text = git(
        "diff-tree",
        "--stdin",
        "-p",
        "-r",
        "--no-color",
        cwd=repository,
        stdin="".join(f"{c}\n" for c in dict.fromkeys(commits)).encode(),  # equal bugs are one commit
    )
    patches: dict[str, list[str]] = {}
    current: list[str] = []
    wanted = set(commits)
    for line in text.removesuffix("\n").split("\n"):
        if line in wanted:
            current = patches.setdefault(line, [])
        else:
            current.append(line + "\n")
    return {branch: "".join(patches[commit]) for branch, commit in zip(branches, commits, strict=True)}


def git(*arguments: str, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    """Run git without the user's configuration. DataError carries git's own last line."""
    environment = {**os.environ, **_GIT_ENV}
    for leaked in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(leaked, None)
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=cwd, input=stdin, capture_output=True, check=False, env=environment
        )
    except FileNotFoundError as error:
        if cwd is not None and not Path(cwd).is_dir():
            raise DataError(f"{cwd} is not a git repository: no such directory") from error
        raise MissingPart("git is not installed; task repositories need it") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DataError(f"git {arguments[0]} failed in {cwd or '.'}: {lines[-1] if lines else 'no message'}")
    return done.stdout.decode("utf-8", errors="surrogateescape")


def _stream(tree: Tree, branches: Iterable[Branch]) -> Iterator[bytes]:
    """The fast-import commands: mark 1 is the clean commit."""
    yield _commit("main", 1, None, CLEAN)
    for path in sorted(tree):
        entry = tree[path]
        yield _file(path, entry.data, entry.mode)
    mark = 1
    for branch in branches:
        mark += 2
        yield _commit(branch.name, mark - 1, 1, "Bug Patch")
        for path in sorted(branch.bug):
            yield _file(path, branch.bug[path], tree[path].mode)
        yield _commit(branch.name, mark, mark - 1, "Remove F2P Tests")
        for path in sorted(branch.tests):
            data = branch.tests[path]
            yield b"D " + _quote(path) + b"\n" if data is None else _file(path, data, tree[path].mode)
    yield b"done\n"


def _commit(branch: str, mark: int, parent: int | None, message: str) -> bytes:
    text = f"commit refs/heads/{branch}\nmark :{mark}\ncommitter {AUTHOR}\ndata {len(message.encode())}\n{message}\n"
    return (text + (f"from :{parent}\n" if parent else "")).encode()


def _file(path: str, data: bytes, mode: str) -> bytes:
    return b"M " + mode.encode() + b" inline " + _quote(path) + b"\ndata %d\n" % len(data) + data + b"\n"


def _quote(path: str) -> bytes:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'.encode()


def without_tests(tree: Tree, test_ids: Sequence[str]) -> dict[str, bytes]:
    """New contents of the test files once the functions behind these pytest ids are taken out.

    An id whose function is not written in its file (inherited, generated) leaves the file as it is.
    """
    wanted: dict[str, set[tuple[str, ...]]] = {}
    for test_id in test_ids:
        path, *names = test_id.split("[", 1)[0].split("::")
        if names and path in tree and tree[path].mode != "120000":
            wanted.setdefault(path, set()).add(tuple(names))
    changed = {}
    for path, names_of_file in wanted.items():
        new = _cut(tree[path].data, names_of_file)
        if new != tree[path].data:
            changed[path] = new
    return changed


@lru_cache(maxsize=64)
def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _cut(source: bytes, names: set[tuple[str, ...]]) -> bytes:
    module = _parsed(source)
    if module is None:
        return source
    lines = source.splitlines(keepends=True)
    replaced: dict[int, bytes] = {}
    _mark(module.body, None, names, lines, replaced)
    return b"".join(replaced.get(number, line) for number, line in enumerate(lines, 1))


def _owns_its_lines(statement: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[bytes]) -> bool:
    """No other statement shares its first or last line (`x = 1; def ...` cannot be, `pass; y = 2` can)."""
    rest = lines[(statement.end_lineno or 0) - 1][statement.end_col_offset or 0 :].strip()
    return not rest or rest.startswith(b"#")


def _mark(
    body: Sequence[ast.stmt],
    prefix: tuple[str, ...] | None,
    names: set[tuple[str, ...]],
    lines: Sequence[bytes],
    replaced: dict[int, bytes],
) -> None:
    """Note which lines go; a block (any body but the module's, whose prefix is None) that loses all gets `pass`."""
    gone = []
    for statement in body:
        name = (*(prefix or ()), getattr(statement, "name", ""))
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and name in names:
            if _owns_its_lines(statement, lines):
                gone.append(statement)
        elif isinstance(statement, ast.ClassDef):
            _mark(statement.body, name, names, lines, replaced)
        elif isinstance(statement, ast.If | ast.Try):
            for block in (statement.body, statement.orelse):
                _mark(block, prefix or (), names, lines, replaced)
    for statement in gone:
        first = min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
        for number in range(first, (statement.end_lineno or first) + 1):
            replaced[number] = b""
        if prefix is not None and len(gone) == len(body) and statement is gone[-1]:
            replaced[first] = b" " * statement.col_offset + b"pass\n"
