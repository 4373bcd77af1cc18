"""Boxes that run commands on a copy of a tree: see base.py for the promise, local.py for how it is kept here."""

from __future__ import annotations

from pathlib import Path

from swe_lightning.errors import UserError
from swe_lightning.recipe import SandboxSection
from swe_lightning.sandbox.base import TREE_ROOT, Backend, ExecResult, FileState, Limits, Sandbox, TreeDiff
from swe_lightning.services import parse_service

__all__ = [
    "TREE_ROOT",
    "Backend",
    "ExecResult",
    "FileState",
    "Limits",
    "Sandbox",
    "TreeDiff",
    "make_backend",
]


def make_backend(section: SandboxSection, memo_dir: Path | None = None) -> Backend:
    """The backend a recipe asks for; `memo_dir` holds remembered commands, if the section names any."""
    if section.backend != "local":
        raise UserError(f"sandbox.backend {section.backend} is not part of this version; use sandbox.backend local")
    from swe_lightning.sandbox.local import LocalBackend

    backend: Backend = LocalBackend(whitelist=tuple(parse_service(s) for s in section.whitelist))
    if section.remember_commands and memo_dir is not None:
        from swe_lightning.sandbox.memo import RememberingBackend

        backend = RememberingBackend(backend, section.remember_commands, memo_dir)
    return backend
