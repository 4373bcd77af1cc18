"""The stages of `swel data filter`, in their order: the one table that code, report and documentation read.

A stage takes rows out and says why: a reason code and a sentence of evidence for each. A rule over one row (`row`) is a
pure function and runs while the input is read; the others look at all rows that are left (branches are asked once per
repository, duplicates compared, tests run) and are bound in pipeline.py. Stages of the paper's recipe come first, so
that its counts are the same under either preset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_pipeline.stages import leaks, rules
from swe_lightning.errors import UserError

Row = Mapping[str, Any]
Found = tuple[str, str]
"""(reason code, evidence)"""
Preset = Literal["paper", "strict"]
PRESETS: tuple[Preset, ...] = ("paper", "strict")


@dataclass(frozen=True)
class Stage:
    name: str
    reasons: tuple[str, ...]
    says: str
    """What leaves, for the documentation and the data card."""
    presets: tuple[Preset, ...] = ("strict",)
    row: Callable[[Row, int], Found | None] | None = None
    """Called with a whole row and the cap on tests."""
    on_demand: bool = False
    """Runs in either preset, but only where the command line gives what it needs."""


BOTH: tuple[Preset, ...] = ("paper", "strict")
STAGES = (
    Stage("empty_issue", ("empty_issue",), "no issue text, or only white space", BOTH, rules.empty_issue),
    Stage("missing_branch", ("missing_branch",), "repository or image lacks the branch of that name", BOTH),
    Stage(
        "test_cap",
        ("test_cap",),
        "more FAIL_TO_PASS + PASS_TO_PASS tests than the cap (200)",
        BOTH,
        rules.too_many_tests,
    ),
    Stage("no_fail_to_pass", ("no_fail_to_pass",), "no test that the fix must turn", row=rules.no_fail_to_pass),
    Stage(
        "no_pass_to_pass",
        ("no_pass_to_pass", "breaks_everything"),
        "no test that must keep passing, or a bug that breaks nearly all of them",
        row=rules.no_pass_to_pass,
    ),
    Stage("tests_only", ("tests_only", "no_patch"), "the patch touches only tests, or nothing", row=rules.only_tests),
    Stage("bug_in_test", ("bug_in_test",), "the patch touches a file of its FAIL_TO_PASS", row=rules.bug_in_test),
    Stage("patch_leak", ("patch_leak",), "the issue text shows the fix", row=leaks.patch_leak),
    Stage("unresolvable_image", ("unresolvable_image",), "neither a local repository nor a usable image name"),
    Stage(
        "eval_overlap",
        ("eval_instance", "eval_issue", "eval_repository"),
        "in the evaluation set: the task, its issue text, or (strict) its repository",
        BOTH,
        on_demand=True,
    ),
    Stage(
        "duplicate_issue", ("duplicate_issue", "near_duplicate_issue"), "an earlier row has (nearly) that issue text"
    ),
    Stage(
        "validation",
        ("null_passes", "gold_fails", "flaky", "timeout", "gold_unusable", "no_verdict"),
        "tests do not say what the row claims: without the fix, or with it",
        BOTH,
        on_demand=True,
    ),
    Stage(
        "difficulty",
        ("all_solved", "none_solved", "undecided"),
        "solved every time, or never (beyond the sample), or without enough verdicts",
        BOTH,
        on_demand=True,
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def choose(preset: Preset, add: Collection[str] = (), skip: Collection[str] = ()) -> tuple[Stage, ...]:
    """The stages of a preset, more and fewer by name, in their order. UserError for a name that is none."""
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    for option, names in (("--stage", add), ("--skip", skip)):
        if unknown := [name for name in names if name not in BY_NAME]:
            raise UserError(f"{option} {unknown[0]}: no such stage; choose among {', '.join(BY_NAME)}")
    return tuple(s for s in STAGES if (preset in s.presets or s.name in add) and s.name not in skip)
