"""A test log -> statuses and a verdict, by the parsers of the benchmark the task comes from. Nothing is run.

SWE-bench rows, and any row with a `log_parser` column, are read by swebench's own parsers (imported late: it brings
docker and modal with it), SWE-smith rows by the rule of its Python profiles, tasks of our own by both forms of pytest's
output. A parser never raises here: a log that none understands has no statuses.

A log is text that the model's own code could write to. What it is worth as proof is said in docs/grading.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swe_lightning.errors import DataError, GradingError, MissingPart
from swe_lightning.grading.rules import STATUSES, Verdict, judge_statuses, origin_of, rules_of
from swe_lightning.records import InfraReason, Task

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
OLD_START = ">>>>> Applied Patch (test)"
"""Logs of SWE-bench before its version 2 have no markers around the tests; they begin after this line."""

NOT_APPLIED = ">>>>> Patch Apply Failed"
BROKEN = (">>>>> Reset Failed", ">>>>> Tests Errored")
TIMED_OUT = ">>>>> Tests Timed Out"

PARSERS = {
    "astropy/astropy": "parse_log_astropy", "django/django": "parse_log_django",
    "matplotlib/matplotlib": "parse_log_matplotlib", "mwaskom/seaborn": "parse_log_seaborn",
    "pallets/flask": "parse_log_flask", "psf/requests": "parse_log_requests", "pydata/xarray": "parse_log_xarray",
    "pylint-dev/pylint": "parse_log_pylint", "pytest-dev/pytest": "parse_log_pytest",
    "scikit-learn/scikit-learn": "parse_log_scikit", "sphinx-doc/sphinx": "parse_log_sphinx",
    "sympy/sympy": "parse_log_sympy",
}  # fmt: skip
"""For rows without a `log_parser` column, as they were published before swebench 5."""

_PYTEST_TOTAL = re.compile(r"\b[1-9]\d* passed\b")
_UNITTEST_TOTAL = re.compile(r"^Ran (\d+) tests? in [^\n]*\n+(OK|FAILED)([^\n]*)", re.MULTILINE)

_EXIT_CODE = re.compile(r">>>>> Test Exit Code:\s*(-?\d+)")
_BARE = re.compile(r"^\s*(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|FAIL:|ERROR:)\s*$", re.MULTILINE)
_VERBOSE = re.compile(r"^(\S+)\s+(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)")
_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::.*?)(?: - .*)?$")


@dataclass
class Reading:
    """What a log says. `believed` False: by the benchmark's rules it is no test result, and `why` names the reason."""

    statuses: dict[str, str] = field(default_factory=dict)
    believed: bool = True
    why: str = ""
    applied: bool = True


def parser_name(task: Task) -> str:
    """Of a SWE-bench row. DataError where neither the row nor its repository names one."""
    name = getattr(task, "log_parser", None) or PARSERS.get(task.repo)
    if not name:
        raise DataError(
            f"task {task.instance_id}: no log_parser column, and {task.repo} is not one of SWE-bench's repositories"
        )
    return str(name)


def swebench() -> Any:
    """The `swebench` package's grading module, or MissingPart."""
    try:
        from swebench.harness import grading
    except ImportError as error:
        raise MissingPart(
            f"grading SWE-bench tasks needs the package swebench ({error}); pip install 'swe-lightning[swe]'"
        ) from error
    return grading


def parse(task: Task, text: str) -> dict[str, str]:
    """Test id -> status, by the parser of the task's benchmark; {} for a text it cannot read."""
    if origin_of(task) == "swebench" or getattr(task, "log_parser", None):
        found = _official(task, text)
    else:
        found = parse_verbose(text)
        if origin_of(task) == "synth":
            found = {**parse_summary(text), **found}
    return found


def parse_verbose(text: str) -> dict[str, str]:
    """SWE-smith's rule for `pytest --verbose`: lines `NODE_ID STATUS`, the last one of a test counts.

    An id with a space in it is not read, as there; published lists hold none.
    """
    return {m.group(1): m.group(2) for line in text.split("\n") if (m := _VERBOSE.match(line))}


def parse_summary(text: str) -> dict[str, str]:
    """pytest's `-rA` summary, lines `STATUS NODE_ID`; the worst one of a test counts."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        if match := _SUMMARY.match(line.rstrip()):
            status, name = match.groups()
            found[name] = max(found.get(name, status), status, key=STATUSES.index)
    return found


def _official(task: Task, text: str) -> dict[str, str]:
    registry, name = swebench().PARSER_REGISTRY, parser_name(task)
    if name not in registry:
        raise DataError(f"task {task.instance_id}: swebench has no log parser {name}")
    for content in (text, _BARE.sub("", text)):  # a status without a name makes some parsers raise
        try:
            return dict(registry[name](content, _spec(task)))
        except Exception:  # whatever a log makes of them: one without statuses is judged by its totals
            continue
    return {}


def _spec(task: Task) -> Any:
    from swebench.types import TestSpec

    return TestSpec(
        instance_id=task.instance_id,
        image=str(getattr(task, "image", "") or task.image_name or ""),
        eval_script_list=[],
        repo=task.repo,
        version=str(getattr(task, "version", "") or ""),
        FAIL_TO_PASS=task.FAIL_TO_PASS,
        PASS_TO_PASS=task.PASS_TO_PASS,
        log_parser=parser_name(task),
        eval_type=eval_type(task),
    )


def eval_type(task: Task) -> str:
    return str(getattr(task, "eval_type", None) or "pass_and_fail")


def cut(text: str) -> str | None:
    """The part the tests wrote: between the markers, after the old marker, or all; None if only one marker is there."""
    if START in text and END in text:
        return text.split(START, 1)[1].split(END, 1)[0]
    if START in text or END in text:
        return None
    return text.split(OLD_START, 1)[1] if OLD_START in text else text


def read(task: Task, text: str) -> Reading:
    """The statuses of a log, under the benchmark's conditions for believing it.

    Raises GradingError for what a machine did: the log says that the set-up failed, or it holds no status at all beside
    a runner's word that tests passed.
    """
    if NOT_APPLIED in text:
        return Reading(believed=False, why="the patch does not apply (as the log says)", applied=False)
    for marker in BROKEN:
        if marker in text:
            raise GradingError(f"{task.instance_id}: the log says {marker.strip('> ')}; the tests did not run")
    if TIMED_OUT in text:
        return Reading(believed=False, why="the tests timed out (as the log says)")
    part = cut(text)
    if part is None:
        return Reading(believed=False, why="the log ends before the tests did")
    code = _EXIT_CODE.search(text)
    return _believe(task, parse(task, part) or parse(task, text), text, int(code.group(1)) if code else 0)


def read_session(task: Task, text: str, exit_code: int) -> Reading:
    """`read` for the output of a session that we ran: it needs no markers, and its exit code is known."""
    return _believe(task, parse(task, text), text, exit_code)


def claims_passes(text: str) -> bool:
    """The runner's own total says that some test passed. Where none is named, nobody read the log rightly."""
    if _PYTEST_TOTAL.search(text):
        return True
    for total, _, broken in _UNITTEST_TOTAL.findall(text):
        if int(total) > sum(map(int, re.findall(r"(?:failures|errors|skipped)=(\d+)", broken))):
            return True
    return False


def names_a_pass(task: Task, statuses: Mapping[str, str]) -> bool:
    return bool(rules_of(task).f2p & set(statuses.values()))


def _believe(task: Task, statuses: dict[str, str], text: str, exit_code: int) -> Reading:
    if not names_a_pass(task, statuses) and eval_type(task) != "fail_only" and claims_passes(text):
        raise GradingError(
            f"{task.instance_id}: the log says that tests passed but names none of them; "
            "the runner has to print a line per test (pytest -rA)",
            InfraReason.PARSE_ERROR,
        )
    if not statuses:
        return _nothing(task, text)
    if exit_code and not {"FAILED", "ERROR"} & set(statuses.values()):
        return Reading(believed=False, why=f"the tests ended with {exit_code} but the log names no failure")
    return Reading(statuses)


def _nothing(task: Task, text: str) -> Reading:
    if origin_of(task) == "swebench":
        from swebench.harness.infra_failure import TIER_ENVIRONMENT, classify_text

        reason, tier = classify_text(text) or ("", "")
        if tier == TIER_ENVIRONMENT:
            raise GradingError(f"{task.instance_id}: no test ran, the log shows {reason}")
        if eval_type(task) == "fail_only" and swebench().SUITE_RAN.search(text):
            return Reading()
    return Reading(believed=False, why="the log holds no test result")


def judge(task: Task, text: str) -> Verdict:
    """The verdict of a saved log. GradingError where the machine is to blame, DataError for a task without tests."""
    if not task.FAIL_TO_PASS:
        raise DataError(f"task {task.instance_id} names no FAIL_TO_PASS tests, so there is nothing to grade")
    reading = read(task, text)
    verdict = judge_reading(task, reading)
    verdict.proof = "saved log"
    verdict.apply = "" if reading.applied else "failed"
    return verdict


def judge_reading(task: Task, reading: Reading) -> Verdict:
    if reading.believed and origin_of(task) == "swebench" and eval_type(task) == "fail_only":
        return _fail_only(task, reading.statuses)
    return judge_statuses(task, reading.statuses if reading.believed else {}, why=reading.why)


def _fail_only(task: Task, statuses: dict[str, str]) -> Verdict:
    """Runners that print failures alone (some JavaScript repositories): what is not named as FAILED passed."""
    full = {i: statuses.get(i.strip(), "PASSED") for i in (*task.FAIL_TO_PASS, *task.PASS_TO_PASS)}
    return judge_statuses(task, {i: "FAILED" if s == "FAILED" else "PASSED" for i, s in full.items()})
