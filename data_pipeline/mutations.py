"""Procedural bugs: where a Python source can be broken by one small, plausible change.

libcst finds the places (mutation_rules.py), but a bug is a text edit (bytes start..end -> replacement): the rest of the
file stays byte for byte. Order is by position, then kind: the same source gives the same list on every machine. Only
code inside functions is touched; annotations, decorators, assertions and f-strings are left alone. Refuses nothing: a
source that does not parse has no mutations.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: bytes `start` to `end` (`old`) become `new`, shrunk to what differs.

    `line` (1-based) and `column` (bytes) say where `start` is.
    """

    kind: str
    path: str
    line: int
    column: int
    function: str
    def_line: int
    """First line of the enclosing function, its decorators included."""
    start: int
    end: int
    old: str
    new: str
    before: str
    """The whole line(s) touched, without the last line end."""
    after: str

    def apply(self, source: bytes) -> bytes:
        begin, before = self.start - self.column, self.before.encode()
        if source[begin : begin + len(before)] != before:
            raise ValueError(f"{self.path}:{self.line} is not the line expected: another version of the file")
        return source[: self.start] + self.new.encode() + source[self.end :]

    @property
    def single_line(self) -> bool:
        return "\n" not in self.before and "\n" not in self.after

    @property
    def key(self) -> str:
        """Short stable name of this place and change."""
        text = f"{self.path}\0{self.start}\0{self.end}\0{self.new}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def find_mutations(source: bytes, path: str) -> list[Mutation]:
    """All bugs for one file, in order of position and kind. Most still compile; `changes_meaning` tells."""
    from data_pipeline.mutation_rules import find

    return sorted(find(source, path), key=lambda m: (m.start, m.kind, m.new))


def changes_meaning(source: bytes, mutated: bytes) -> bool:
    """True if the mutated file still parses and its syntax tree differs."""
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return False
