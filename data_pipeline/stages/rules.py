"""Rules over one row alone: what it says, how many tests it names, what its patch touches.

Each returns (reason code, evidence) where the row has to leave, else None. In SWE-smith rows `patch` introduces the
bug, in SWE-bench rows it is the fix; the paths it touches mean the same in both.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Row = Mapping[str, Any]
TEST_CAP = 200
"""FAIL_TO_PASS + PASS_TO_PASS of one task, as in the paper's recipe."""
BREAKS_SHARE, BREAKS_AT_LEAST = 0.9, 20
"""A bug breaks everything if it fails this share of the named tests and at least so many of them."""
_TEST_DIRS = {"test", "tests", "testing", "__tests__"}
_TEST_FILE = re.compile(r"(test_.*|.*_test|.*\.test|.*\.spec|tests|conftest)\.\w+")
_HEADER = re.compile(r"^(?:\+\+\+ b/|--- a/|rename (?:from|to) )([^\t\n]+)|^diff --git a/(\S+) b/\2$", re.MULTILINE)


def empty_issue(row: Row, _cap: int = TEST_CAP) -> tuple[str, str] | None:
    """No problem statement, or only white space: nothing to tell the agent."""
    statement = row.get("problem_statement")
    if statement and not statement.isspace():
        return None
    return "empty_issue", f"problem_statement is {(statement if statement is None else statement[:40])!r}"


def too_many_tests(row: Row, cap: int = TEST_CAP) -> tuple[str, str] | None:
    """More tests than a verdict should cost; one that is listed twice counts once."""
    fail, keep = len(row["FAIL_TO_PASS"]), len(row["PASS_TO_PASS"])
    if fail + keep <= cap or _distinct_tests(row, cap) <= cap:
        return None
    return "test_cap", f"{fail} FAIL_TO_PASS + {keep} PASS_TO_PASS > {cap}"


def no_fail_to_pass(row: Row, _cap: int = TEST_CAP) -> tuple[str, str] | None:
    """Nothing tells a fix from no fix."""
    return None if row["FAIL_TO_PASS"] else ("no_fail_to_pass", "FAIL_TO_PASS is empty")


def no_pass_to_pass(row: Row, _cap: int = TEST_CAP) -> tuple[str, str] | None:
    """Nothing guards what works, or next to nothing works: an import that fails, say, and any clean tree repairs."""
    fail, keep = len(row["FAIL_TO_PASS"]), len(row["PASS_TO_PASS"])
    if not keep:
        return "no_pass_to_pass", f"{fail} FAIL_TO_PASS, no PASS_TO_PASS"
    if fail >= BREAKS_AT_LEAST and fail >= BREAKS_SHARE * (fail + keep):
        return "breaks_everything", f"{fail} of {fail + keep} tests fail"
    return None


def only_tests(row: Row, _cap: int = TEST_CAP) -> tuple[str, str] | None:
    """The bug (or the fix) lies in tests, which a model may not change."""
    paths = touched(row.get("patch") or "")
    if not paths:
        return "no_patch", "patch names no file"
    if all(is_test(path) for path in paths):
        return "tests_only", f"the patch touches only {', '.join(sorted(paths)[:3])}"
    return None


def bug_in_test(row: Row, _cap: int = TEST_CAP) -> tuple[str, str] | None:
    """The file of a FAIL_TO_PASS test is part of the patch: grading restores it, and with it the fix."""
    files = {test.split("::", 1)[0] for test in row["FAIL_TO_PASS"] if "::" in test}
    both = sorted(touched(row.get("patch") or "") & files)
    return ("bug_in_test", f"{both[0]} holds a FAIL_TO_PASS test and is patched") if both else None


def _distinct_tests(row: Row, cap: int) -> int:
    """Counted no further than needed: the long lists are those that are over the cap."""
    fail, keep = row["FAIL_TO_PASS"], row["PASS_TO_PASS"]
    first = max(len(set(fail[: cap + 1])), len(set(keep[: cap + 1])))
    return first if first > cap else len(set(fail)) + len(set(keep))


@lru_cache(maxsize=8)
def touched(patch: str) -> frozenset[str]:
    """Paths a git-format patch names."""
    return frozenset(one or other for one, other in _HEADER.findall(patch)) - {"/dev/null"}


def is_test(path: str) -> bool:
    *folders, name = posixpath.normpath(path).split("/")
    return bool(_TEST_DIRS & set(folders)) or _TEST_FILE.fullmatch(name) is not None
