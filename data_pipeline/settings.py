"""What decides a filtered set (settings, written into its report), and what the stages ask the world with (tools)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from data_pipeline import probe as probing
from data_pipeline import stages
from data_pipeline.probe_results import Results
from data_pipeline.split import Mode
from data_pipeline.stages.branches import BranchesOfImage
from data_pipeline.stages.rules import TEST_CAP
from data_pipeline.validate import GradeOnce


@dataclass(frozen=True)
class FilterSettings:
    """Everything that decides the result; written into the report."""

    preset: stages.Preset = "paper"
    add: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0
    hub_split: str | None = None
    test_cap: int = TEST_CAP
    eval_set: tuple[str, ...] = ()
    validations: int = 0
    """Gradings of the fix per row; 0 leaves the stage out."""
    k: int = 4
    keep_none_solved: int = probing.NONE_SOLVED_KEPT
    split: Mode = "auto"
    val_size: int | None = None
    held_out_repos: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tools:
    """What the stages ask the world with; none of it belongs to the settings."""

    branches: Mapping[str, Collection[str]] | None = None
    branches_file: str | None = None
    """Where `branches` was read, for the data card."""
    of_image: BranchesOfImage | None = None
    """Branches of an image, at most one container each; see stages.branches."""
    outcomes: Results | None = None
    """Probe results measured elsewhere."""
    rollouts: AbstractContextManager[probing.Rollouts] | None = None
    probe_identity: str | None = None
    """What `rollouts` probes. Outcomes of another probe are never counted for this one."""
    grade: GradeOnce | None = None
    grade_identity: str = ""
    also: tuple[str, ...] = ()
    """Options that made these tools and that whoever repeats the command has to give again."""
    workers: int = 2
    stream: bool = False
