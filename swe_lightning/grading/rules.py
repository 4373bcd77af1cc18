"""What each test status is worth: one written table per kind of task, and which kind a task is.

docs/grading.md shows the same table and a test compares the two. A test that did not run has no status, and no status
is a failed test. `own` is for tasks of `swel data synth`, whose statuses the session recorder took; `official` is the
table of SWE-bench 5, which SWE-smith's rows share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swe_lightning.records import Task

Origin = Literal["synth", "swebench", "swesmith"]

STATUSES = ("PASSED", "XFAIL", "XPASS", "SKIPPED", "FAILED", "ERROR", "missing")


@dataclass(frozen=True)
class Rules:
    """Statuses that count as passed, for FAIL_TO_PASS and for PASS_TO_PASS tests."""

    name: str
    f2p: frozenset[str]
    p2p: frozenset[str]


OWN = Rules("own", frozenset({"PASSED", "XFAIL", "XPASS"}), frozenset({"PASSED", "XFAIL", "XPASS"}))
"""XFAIL passes only where the tests themselves expect the failure (the recorder turns others into FAILED). XPASS is a
body that ran through; strict ones are FAILED. A PASS_TO_PASS test of ours passed on the clean tree, so one that is
skipped now was switched off by the patch."""

OFFICIAL = Rules("official", frozenset({"PASSED", "XFAIL"}), frozenset({"PASSED", "XFAIL", "SKIPPED"}))
"""swebench.harness.grading: a skipped PASS_TO_PASS test is no regression; its parsers do not know XPASS. SWE-smith
0.0.9 leaves skipped tests out of both counts, so that skipping every FAIL_TO_PASS test would resolve a task: not
followed."""


@dataclass
class Verdict:
    """What the tests said. `f2p`: id -> passed; `apply`: how the patch reached the tree (files, git-apply, patch-fuzz,
    empty, failed)."""

    resolved: bool
    reward: float
    """1.0 or 0.0, never shaped."""
    f2p: dict[str, bool] = field(default_factory=dict)
    p2p_failed: list[str] = field(default_factory=list)
    dropped_paths: list[str] = field(default_factory=list)
    tampering: dict[str, str] = field(default_factory=dict)
    """Path -> why it was filtered, for what would have changed the tests, their configuration or their runner."""
    apply: str = ""
    why: str = ""
    proof: str = ""
    """How it is known that the session ended: recorder, log (weaker: docs/grading.md), saved log, none."""
    order: list[str] = field(default_factory=list)
    """What was done to the fresh tree, in order."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def origin_of(task: Task) -> Origin:
    """SWE-bench rows bring a test patch; SWE-smith rows are named `swesmith/...` and have no command of their own."""
    if task.test_patch is not None:
        return "swebench"
    image = task.image_name or ""
    if task.test_cmd is None and (task.repo.startswith("swesmith/") or "swesmith." in image):
        return "swesmith"
    return "synth"


def rules_of(task: Task) -> Rules:
    return OWN if origin_of(task) == "synth" else OFFICIAL


def status_of(test_id: str, statuses: Mapping[str, str], rules: Rules) -> str | None:
    """The status of one test, white space around the id ignored on both sides (`statuses` has stripped keys).

    676 ids of SWE-bench Verified are cut within their parameters (`test_x[a`). As in swebench, such an id stands for
    the tests that begin with it where these agree on passed or failed.
    """
    test_id = test_id.strip()
    if test_id in statuses or rules is OWN or test_id.count("[") <= test_id.count("]"):
        return statuses.get(test_id)
    found = [status for name, status in statuses.items() if name.startswith(test_id)]
    return found[0] if len({status in rules.f2p for status in found}) == 1 else None


def judge_statuses(task: Task, statuses: Mapping[str, str], *, why: str = "", rules: Rules | None = None) -> Verdict:
    """The verdict over all listed tests. `why` explains statuses that are empty: nothing could be believed."""
    rules = rules or rules_of(task)
    by_id = {name.strip(): status for name, status in statuses.items()}
    f2p = {i: status_of(i, by_id, rules) in rules.f2p for i in task.FAIL_TO_PASS}
    p2p_failed = [i for i in task.PASS_TO_PASS if status_of(i, by_id, rules) not in rules.p2p]
    resolved = all(f2p.values()) and not p2p_failed
    if resolved:
        why = ""
    elif not why:
        broken = [i for i, passed in f2p.items() if not passed]
        parts = []
        for what, ids in (("FAIL_TO_PASS", broken), ("PASS_TO_PASS", p2p_failed)):
            if ids:
                said = status_of(ids[0], by_id, rules) or "did not run"
                parts.append(f"{len(ids)} of {len(getattr(task, what))} {what} fail, first {ids[0]} ({said})")
        why = "; ".join(parts)
    return Verdict(resolved, 1.0 if resolved else 0.0, f2p, p2p_failed, why=why)


def table() -> str:
    """The table as docs/grading.md prints it."""
    lines = ["| status | own, FAIL_TO_PASS | own, PASS_TO_PASS | official, FAIL_TO_PASS | official, PASS_TO_PASS |"]
    lines.append("|---|---|---|---|---|")
    for status in STATUSES:
        cells = ["passes" if status in kind else "fails" for r in (OWN, OFFICIAL) for kind in (r.f2p, r.p2p)]
        lines.append(f"| {status} | {' | '.join(cells)} |")
    return "\n".join(lines)
