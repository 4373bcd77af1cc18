"""A patch text applied to a tree by git itself, on copies of the touched files in a scratch directory.

Never in the box, never prompting, never outside the scratch directory; `patch` with fuzz is the fallback, as in
SWE-bench. The result is a TreeDiff: what the files became, byte for byte.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swe_lightning.errors import MissingPart, SwelError
from swe_lightning.grading.git_patch import ESCAPES, changes_only, read_state
from swe_lightning.sandbox import FileState, TreeDiff


class PatchError(SwelError):
    """The patch cannot be applied to this tree (says nothing about the machine)."""


_HEADER = re.compile(rb"^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to |diff --git )(.*)$", re.MULTILINE)
_UNESCAPES = {v: k for k, v in ESCAPES.items()}


def touched_paths(patch: bytes) -> list[str]:
    """Every path a patch may name (over-inclusive: hunk lines that look like headers count too)."""
    found: dict[str, None] = {}
    for match in _HEADER.finditer(patch):
        for name in _names(match.group(1).rstrip(b"\r")):
            if name not in (b"/dev/null", b""):
                found[os.fsdecode(name)] = None
                if name[:2] in (b"a/", b"b/"):
                    found[os.fsdecode(name[2:])] = None
    return list(found)


def _names(text: bytes) -> Iterator[bytes]:
    quoted = re.findall(rb'"((?:[^"\\]|\\.)*)"', text)
    for name in quoted:
        yield re.sub(rb"\\([0-7]{3}|.)", lambda m: _unescape(m.group(1)), name)
    if not quoted:
        yield text.split(b"\t", 1)[0]
        if text.startswith(b"a/"):  # diff --git a/x b/x: mode changes and binary files name the path only here
            for cut in re.finditer(rb" b/", text):
                yield text[: cut.start()]
                yield text[cut.start() + 1 :]


def _unescape(code: bytes) -> bytes:
    return bytes([int(code, 8) & 255]) if len(code) == 3 else bytes([_UNESCAPES.get(code, code[0])])


def from_patch(base: Path, patch: bytes, *, reverse: bool = False) -> tuple[TreeDiff, str]:
    """Apply a patch text to copies of the touched files: (changes, method), method git-apply or patch-fuzz.

    Raises PatchError if neither can apply it, MissingPart without git.
    """
    if not patch.strip():
        return {}, "empty"
    paths = [p for p in touched_paths(patch) if not is_unsafe(p)]
    reason = ""
    for method, argv in _APPLY.items():
        if method == "patch-fuzz" and b"\nnew file mode 120000" in patch:
            continue  # only git refuses to write through a symlink
        with tempfile.TemporaryDirectory(prefix="swel-apply-") as scratch:
            _copy(base, Path(scratch), paths)
            failed = _apply([*argv, *(["-R"] if reverse else [])], Path(scratch), patch)
            if failed is None:
                return _compare(base, Path(scratch), paths), method
            reason = reason or failed
    raise PatchError(f"the patch does not apply: {reason}")


_APPLY = {
    "git-apply": ["git", "-c", "core.autocrlf=false", "-c", "core.fileMode=true", "apply", "--whitespace=nowarn", "-"],
    "patch-fuzz": [
        "patch",
        "--batch",
        "--forward",
        "--fuzz=5",
        "--binary",
        "-p1",
        "--no-backup-if-mismatch",
        "-r",
        "-",
    ],
}


def is_unsafe(path: str) -> bool:
    """Leaves the tree, reaches into git's own directory, or is longer than any file system here takes."""
    parts = path.split("/")
    too_long = len(os.fsencode(path)) > 1024 or any(len(os.fsencode(part)) > 255 for part in parts)
    return path.startswith("/") or ".." in parts or "" in parts or "\0" in path or parts[0] == ".git" or too_long


def parents(path: str) -> Iterator[str]:
    """The directories above a path, outermost first."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        yield "/".join(parts[:depth])


def _copy(base: Path, scratch: Path, paths: list[str]) -> None:
    for path in paths:
        state = read_state(base, path)
        if state is not None and not any((base / parent).is_symlink() for parent in parents(path)):
            put(scratch, path, state)


def put(root: Path, path: str, state: FileState) -> None:
    target = os.path.join(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if state.symlink:
        os.symlink(state.data, os.fsencode(target))
        return
    with open(target, "wb") as f:
        f.write(state.data)
    os.chmod(target, state.mode | 0o600)


def _apply(argv: list[str], scratch: Path, patch: bytes) -> str | None:
    """None if it went through, else the tool's own words."""
    quiet = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(scratch.parent),
    }
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(scratch), "LC_ALL": "C.UTF-8", **quiet}
    try:
        done = subprocess.run(argv, cwd=scratch, env=environment, input=patch, capture_output=True, timeout=120)
    except FileNotFoundError:
        if argv[0] == "git":
            raise MissingPart("git is not installed here; reading a patch text needs it (install git)") from None
        return "patch is not installed"
    except subprocess.TimeoutExpired:
        return f"{argv[0]} took longer than 120 s"
    words = (done.stderr + done.stdout).decode("utf-8", "replace").strip().splitlines()
    return None if done.returncode == 0 else (words or ["no reason given"])[0]


def _compare(base: Path, scratch: Path, paths: list[str]) -> TreeDiff:
    """What the scratch copies became, as changes to the tree."""
    found: TreeDiff = {p: None for p in paths if read_state(base, p) is not None}
    for folder, folders, names in os.walk(scratch):
        links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
        for name in [*names, *links]:
            path = os.path.relpath(os.path.join(folder, name), scratch)
            found[path] = read_state(scratch, path)
    return changes_only(base, found)
