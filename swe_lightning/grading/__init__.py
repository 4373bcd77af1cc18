"""Patch -> verdict, taken in a fresh sandbox where the agent never was."""

from swe_lightning.grading.grade import Grader
from swe_lightning.grading.patch import filter_diff, filter_patch, to_patch
from swe_lightning.grading.rules import Verdict
from swe_lightning.grading.run_tests import TestRun, run_tests

__all__ = ["Grader", "TestRun", "Verdict", "filter_diff", "filter_patch", "run_tests", "to_patch"]
