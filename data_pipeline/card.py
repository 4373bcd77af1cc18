"""The data card: what a filtered set holds, where it comes from, and the command that makes it again.

The command names the inputs as they were read (a hub data set with its revision) and every setting that is not the
default. A probe samples from a model and cannot be repeated, so the command reads the outcomes it left. What a card
promises can be checked: it lists the digests of train.jsonl and val.jsonl.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from data_pipeline.probe import OUTCOMES_FILE
from data_pipeline.settings import FilterSettings
from data_pipeline.tables import table
from swe_lightning import __version__

LIBRARIES = ("orjson", "numpy", "pyarrow", "datasets", "zstandard", "matplotlib")
OPTIONS = {
    "add": "stage",
    "validations": "validate",
    "held_out_repos": "held-out-repo",
}
"""Settings whose option has another name than the setting."""


def rerun(report: Mapping[str, Any], out: Path) -> list[str]:
    """Arguments of `swel` that make the same train.jsonl and val.jsonl in a directory beside `out`."""
    source, settings = report["source"], report["settings"]
    words = ["data", "filter"]
    for name in _pinned(source):
        words += ["--input", name]
    words += ["--out", str(out.with_name(out.name + "-again"))]
    for field in fields(FilterSettings):
        if settings[field.name] != field.default:
            words += _option(OPTIONS.get(field.name, field.name.replace("_", "-")), settings[field.name])
    if source.get("branches"):
        words += ["--branches", source["branches"]]
    outcomes = str(out / OUTCOMES_FILE) if source.get("probe") else source.get("probe_results")
    if outcomes:
        words += ["--probe-results", outcomes]
    return [*words, *source.get("also", ())]


def _option(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (f"--{name}", str(one))]


def _pinned(source: Mapping[str, Any]) -> list[str]:
    """Names of the inputs; a hub data set with the revision that was read."""
    revisions = {hub["data_set"]: hub["revision"] for hub in source.get("hub", ()) if hub.get("revision")}
    names = []
    for name, known in zip(source["inputs"], source["data_sets"], strict=True):
        names.append(f"{known}@{revisions[known]}" if known in revisions and not Path(known).is_dir() else name)
    return names


def versions() -> dict[str, str]:
    """What the bytes of the result may depend on."""
    found = {"swe_lightning": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def card(report: Mapping[str, Any], out: Path, digests: Mapping[str, str]) -> str:
    """Markdown. `digests`: file name -> SHA-256, of every output that a rerun must give again."""
    source = report["source"]
    parts = [
        f"# {out.absolute().name}",
        f"{report['train']} training and {report['val']} validation tasks from {len(report['repositories'])} "
        f"repositories, filtered from {report['rows_in']} rows (split: {report['split']}). `report.md` says what left "
        "and why; `dropped.jsonl` holds each of those rows' reason.",
        "## Files",
        table(
            ("file", "rows", "sha256"),
            [(f"`{name}`", report[name.split(".")[0]], f"`{digest}`") for name, digest in digests.items()],
        ),
        "The rows are as their source published them, test lists and `repo_path` brought into one shape; their licence "
        "is that of the source and of the repositories.",
        "## Source",
        table(("what", "which"), list(_sources(source))),
        "## Settings",
        f"Stages, in this order: {', '.join(step['stage'] for step in report['funnel'])}. Seed {report['seed']}.",
        f"```json\n{json.dumps(report['settings'], indent=2)}\n```",
        "## Versions",
        table(("part", "version"), list(report["versions"].items())),
        "## To make it again",
        f"From the directory where the inputs are found under these names:\n\n"
        f"    swel {shlex.join(rerun(report, out))}\n\n"
        "gives a `train.jsonl` and a `val.jsonl` with the digests above; `swel data diff` says what differs "
        "otherwise. It writes beside this directory, because rows name their repositories relative to their file.",
        *_caveats(report),
    ]
    return "\n\n".join(parts) + "\n"


def _sources(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"`{name}`", f"sha256 `{digest}`") for name, digest in source["sha256"].items()]
    for hub in source.get("hub", ()):
        revision = f"revision `{hub['revision']}`" if hub.get("revision") else "revision unknown"
        rows.append((f"`{hub['data_set']}`", f"split {hub['split']}, {revision}"))
    return rows


def _caveats(report: Mapping[str, Any]) -> list[str]:
    source, said = report["source"], []
    if source.get("probe"):
        said.append(
            f"The difficulty comes from a probe, which samples: the command reads the outcomes it left "
            f"(`{OUTCOMES_FILE}`) instead of running it anew. Probed: {source['probe']}"
        )
    if report["settings"]["validations"]:
        said.append("Validation runs tests: the same rows leave only where the tests say the same on your machine.")
    if report["branches_unchecked"]:
        said.append(f"The branch of {report['branches_unchecked']} rows could not be checked.")
    return ["## What the command cannot promise", *said] if said else []
