"""What a training row must not give away: its own fix in the issue text, and the evaluation set.

The fix of a SWE-smith row is what its `patch` takes away (the patch introduces the bug), that of a SWE-bench row what
its patch adds. Repositories are compared by their upstream name, because SWE-smith publishes `owner/name` as
`swesmith/owner__name.commit`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
SIGNIFICANT_CHARS = 24
"""Shorter lines (`return None`, `else:`) occur in issue texts without giving anything away."""
LEAK_SHARE = 0.5
_TRIVIAL = re.compile(r"(#|//|\"\"\"|from \S+ import|import )")
_SMITH = re.compile(r"(?:swesmith/|swebench/)?(?:swesmith\.x86_64\.)?(.+?)(?:__|_1776_)(.+)\.[0-9a-f]{8}")


def patch_leak(row: Row, _cap: int = 0) -> tuple[str, str] | None:
    """At least half of the fix's significant lines stand in the issue text, white space apart."""
    issue = _squeeze(row.get("problem_statement") or "")
    lines = fix_lines(row)
    shown = [line for line in lines if line in issue]
    if not shown or len(shown) < LEAK_SHARE * len(lines):
        return None
    return "patch_leak", f"{len(shown)} of {len(lines)} lines of the fix, for example {shown[0][:80]!r}"


def fix_lines(row: Row) -> list[str]:
    """Significant lines of the fix that the other side of the patch does not have too (moved lines tell nothing)."""
    sides: dict[str, list[str]] = {"+": [], "-": []}
    for line in (row.get("patch") or "").split("\n"):
        if line[:1] in sides and not line.startswith(("+++ ", "--- ")):
            sides[line[0]].append(_squeeze(line[1:]))
    fix, bug = (sides["+"], sides["-"]) if row.get("test_patch") is not None else (sides["-"], sides["+"])
    other = set(bug)
    return [
        line
        for line in dict.fromkeys(fix)
        if len(line) >= SIGNIFICANT_CHARS and line not in other and not _TRIVIAL.match(line)
    ]


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def upstream(repo: str) -> str:
    """`swesmith/owner__name.0123abcd` and `Owner/Name` are one repository."""
    found = _SMITH.fullmatch(repo)
    return (f"{found[1]}/{found[2]}" if found else repo).lower()


def issue_digest(text: str) -> bytes:
    """Equal for texts that differ in white space and case alone."""
    return hashlib.blake2b(_squeeze(text).lower().encode("utf-8", "surrogatepass"), digest_size=12).digest()


@dataclass(frozen=True)
class EvaluationSet:
    """What a training row is compared with."""

    instances: set[str] = field(default_factory=set)
    issues: set[bytes] = field(default_factory=set)
    repositories: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> EvaluationSet:
        found = cls()
        for row in rows:
            found.instances.add(row["instance_id"])
            found.repositories.add(upstream(row["repo"]))
            if (row.get("problem_statement") or "").strip():
                found.issues.add(issue_digest(row["problem_statement"]))
        return found

    def overlap(self, rows: Sequence[Row], *, repositories: bool) -> dict[int, tuple[str, str]]:
        """Rows (with `issue_digest`) to take out: {index: (reason, evidence)}."""
        rejected: dict[int, tuple[str, str]] = {}
        for index, row in enumerate(rows):
            if row["instance_id"] in self.instances:
                rejected[index] = ("eval_instance", "the evaluation set holds this task")
            elif row.get("issue_digest") in self.issues:
                rejected[index] = ("eval_issue", "a task of the evaluation set has this issue text")
            elif repositories and (name := upstream(row["repo"])) in self.repositories:
                rejected[index] = ("eval_repository", f"the evaluation set holds tasks of {name}")
        return rejected
