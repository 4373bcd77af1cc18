"""A tree's changes as a git-format patch, bytes exact: what `git apply` reads back to the same files.

Text, binary, mode, symlink, new and deleted files; renames are written as delete and create. Content that is not UTF-8
travels as a binary hunk, so a patch is always valid UTF-8 and survives a JSON predictions file.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from swe_lightning.sandbox import FileState, TreeDiff

LARGE_HUNK = 4_000_000
"""Product of changed lines beyond which one replacing hunk is written instead of a minimal difference."""


def read_state(base: Path, path: str) -> FileState | None:
    """The state of one file of a tree; None if there is none (or a directory)."""
    full = os.path.join(base, path)
    try:
        mode = os.lstat(full).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return FileState(os.fsencode(os.readlink(full)), 0o777, symlink=True)
    if not stat.S_ISREG(mode):
        return None
    with open(full, "rb") as f:
        return FileState(f.read(), 0o755 if mode & 0o100 else 0o644)


def git_mode(state: FileState) -> str:
    return "120000" if state.symlink else "100755" if state.mode & 0o100 else "100644"


def same(a: FileState | None, b: FileState | None) -> bool:
    """Equal as git sees it: content, kind and the executable bit."""
    if a is None or b is None:
        return a is b
    return a.data == b.data and git_mode(a) == git_mode(b)


def changes_only(base: Path, diff: TreeDiff) -> TreeDiff:
    """`diff` without entries that leave the tree as it is, ordered by path."""
    return {p: diff[p] for p in sorted(diff) if not same(read_state(base, p), diff[p])}


def to_patch(base: Path, diff: TreeDiff) -> bytes:
    """The changes `diff` makes to the tree `base`, as a patch for `git apply` (renames as delete and create)."""
    deletions: list[bytes] = []
    others: list[bytes] = []
    for path, new in changes_only(base, diff).items():
        old = read_state(base, path)
        if old is not None and new is not None and old.symlink != new.symlink:
            deletions.append(_section(path, old, None))
            old = None
        (deletions if new is None else others).append(_section(path, old, new))
    return b"".join(deletions + others)


def _section(path: str, old: FileState | None, new: FileState | None) -> bytes:
    a, b = _quote("a/" + path), _quote("b/" + path)
    lines = [b"diff --git %s %s" % (a, b)]
    if old is None:
        assert new is not None
        lines.append(b"new file mode " + git_mode(new).encode())
    elif new is None:
        lines.append(b"deleted file mode " + git_mode(old).encode())
    elif git_mode(old) != git_mode(new):
        lines += [b"old mode " + git_mode(old).encode(), b"new mode " + git_mode(new).encode()]
    before, after = old.data if old else b"", new.data if new else b""
    if before == after and old is not None and new is not None:
        return b"\n".join(lines) + b"\n"
    lines.append(b"index %s..%s" % (_blob(old), _blob(new)))
    if before == after:  # an empty file appears or goes
        return b"\n".join(lines) + b"\n"
    if _is_binary(before) or _is_binary(after):
        return b"\n".join([*lines, b"GIT binary patch", *_literal(after), b"", *_literal(before), b"", b""])
    lines += [b"--- " + (_named(a) if old else b"/dev/null"), b"+++ " + (_named(b) if new else b"/dev/null")]
    return b"\n".join(lines) + b"\n" + b"".join(_hunks(before, after))


def _hunks(before: bytes, after: bytes) -> Iterator[bytes]:
    a, b = _lines(before), _lines(after)
    for group in _grouped(a, b):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        yield b"@@ -%s +%s @@\n" % (_range(a0, a1), _range(b0, b1))
        for tag, i, j, k, m in group:
            if tag == "equal":
                yield from (_line(b" ", x) for x in a[i:j])
                continue
            yield from (_line(b"-", x) for x in a[i:j])
            yield from (_line(b"+", x) for x in b[k:m])


def _grouped(a: list[bytes], b: list[bytes]) -> Any:
    """difflib's groups with three lines of context; common ends are cut first, because difflib is quadratic."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    matcher: Any = SequenceMatcher(None, middle_a, middle_b, autojunk=False)
    if len(middle_a) * len(middle_b) > LARGE_HUNK:
        matcher.opcodes = [("replace", 0, len(middle_a), 0, len(middle_b))]
    codes = [(t, i + head, j + head, k + head, m + head) for t, i, j, k, m in matcher.get_opcodes()]
    if head:
        codes.insert(0, ("equal", 0, head, 0, head))
    if tail:
        codes.append(("equal", len(a) - tail, len(a), len(b) - tail, len(b)))
    matcher.opcodes = codes
    return matcher.get_grouped_opcodes(3)


def _lines(data: bytes) -> list[bytes]:
    """Lines with their newline; only \\n separates (a lone \\r or \\f is content)."""
    parts = data.split(b"\n")
    return [p + b"\n" for p in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n\\ No newline at end of file\n"


def _range(start: int, stop: int) -> bytes:
    length = stop - start
    return b"%d,%d" % (start + 1 if length else start, length)


def _is_binary(data: bytes) -> bool:
    if b"\0" in data:
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def _literal(data: bytes) -> list[bytes]:
    """git's binary hunk: zlib, then lines of up to 52 bytes in base 85, led by their length (A-Z, a-z)."""
    packed = zlib.compress(data)
    lines = [b"literal %d" % len(data)]
    for at in range(0, len(packed), 52):
        chunk = packed[at : at + 52]
        length = bytes([64 + len(chunk)]) if len(chunk) <= 26 else bytes([70 + len(chunk)])
        padded = chunk + b"\0" * (-len(chunk) % 4)
        lines.append(length + base64.b85encode(padded))
    return lines


def _blob(state: FileState | None) -> bytes:
    if state is None:
        return b"0" * 40
    return hashlib.sha1(b"blob %d\0" % len(state.data) + state.data, usedforsecurity=False).hexdigest().encode()


ESCAPES = {7: b"a", 8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}


def _quote(path: str) -> bytes:
    raw = os.fsencode(path)
    if all(32 <= c < 127 and c not in (34, 92) for c in raw):
        return raw
    escaped = b"".join(
        b"\\" + ESCAPES[c] if c in ESCAPES else bytes([c]) if 32 <= c < 127 else b"\\%03o" % c for c in raw
    )
    return b'"' + escaped + b'"'


def _named(quoted: bytes) -> bytes:
    """git ends a name that holds a space with a tab, so that it is not read as a time stamp."""
    return quoted + b"\t" if b" " in quoted and not quoted.startswith(b'"') else quoted
