"""`swel data synth`: what was asked for, whether it is made already, and who makes it.

An order is data: it says what decides the tasks (not how many run at once), so that OUT/synth.json can tell one order
from another. A local repository is resolved to its commit before anything is compared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from data_pipeline import make as made
from data_pipeline.issue_model import IssueModel, IssueWriter
from data_pipeline.make import SearchOptions
from data_pipeline.outputs import file_digest
from data_pipeline.packages import find_repository
from data_pipeline.synth_record import made_once
from data_pipeline.testbed import TRIAL_VERSION
from swe_lightning import __version__

ISSUES_FILE = "issues.jsonl"
"""Beside the tasks: every issue text a model wrote."""


@dataclass(frozen=True)
class FromManifest:
    file: Path
    train_limit: int | None = None
    held_out_limit: int | None = None
    max_seconds: float | None = None

    def asked(self) -> dict[str, Any]:
        digest = file_digest(self.file) if self.file.is_file() else None
        return {**asdict(self), "file": digest}


@dataclass(frozen=True)
class Search:
    pypi: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    repo: str | None = None
    """PATH or PATH@REVISION"""
    options: SearchOptions = field(default_factory=SearchOptions)
    test_cmd: str | None = None
    test_env: dict[str, str] = field(default_factory=dict)
    issue_model: IssueModel | None = None

    def asked(self) -> dict[str, Any]:
        plain = asdict(self)
        options = {f"options.{key}": value for key, value in plain.pop("options").items() if key != "workers"}
        repo = find_repository(self.repo) if self.repo else None
        return {**plain, **options, "repo": [str(repo[0].resolve()), repo[1]] if repo else None}


Order = FromManifest | Search


def make(
    order: Order, out: Path, *, write_manifest: Path | None, backend: Any, workers: int, overwrite: bool
) -> dict[str, Any]:
    """Tasks, counts and reasons; see commands.synth."""

    def work() -> dict[str, Any]:
        if isinstance(order, FromManifest):
            return made.from_manifest(
                order.file,
                out,
                backend=backend,
                workers=workers,
                train_limit=order.train_limit,
                held_out_limit=order.held_out_limit,
                write_manifest=write_manifest,
                max_seconds=order.max_seconds,
            )
        return _search(order, out, write_manifest, backend)

    asked = {"kind": type(order).__name__, **order.asked()}
    lacking = write_manifest is not None and not write_manifest.exists()
    return made_once(out, asked, _versions(), work, overwrite=overwrite, anew=lacking)


def _search(order: Search, out: Path, write_manifest: Path | None, backend: Any) -> dict[str, Any]:
    def run(writer: IssueWriter | None) -> dict[str, Any]:
        return made.from_packages(
            out,
            pypi=order.pypi,
            held_out=order.held_out,
            repo=find_repository(order.repo) if order.repo else None,
            write_manifest=write_manifest,
            search=order.options,
            test_cmd=order.test_cmd,
            test_env=order.test_env or None,
            backend=backend,
            writer=writer,
        )

    if order.issue_model is None:
        return run(None)
    with IssueWriter(order.issue_model, out / ISSUES_FILE, seed=order.options.seed) as writer:
        return run(writer)


def _versions() -> dict[str, str]:
    from swe_lightning.sandbox.pyenv import test_environment

    return {
        "swe_lightning": __version__,
        "libcst": metadata.version("libcst"),
        "test_environment": test_environment().name,
        "trials": str(TRIAL_VERSION),
    }
