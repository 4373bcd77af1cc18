"""Boxes that run commands on a copy of a tree: base.py has the promise, local, docker and kubernetes keep it."""

from __future__ import annotations

from pathlib import Path

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
    whitelist = tuple(parse_service(s) for s in section.whitelist)
    backend: Backend
    if section.backend == "docker":
        from swe_lightning.sandbox.docker import DockerBackend

        backend = DockerBackend(
            image=section.image, registry=section.image_registry, start_limit=section.start_limit, whitelist=whitelist
        )
    elif section.backend == "kubernetes":
        from swe_lightning.sandbox.kubernetes import KubernetesBackend

        backend = KubernetesBackend(
            section.kubernetes,
            image=section.image,
            registry=section.image_registry,
            start_limit=section.start_limit,
            whitelist=whitelist,
        )
    else:
        from swe_lightning.sandbox.local import LocalBackend

        backend = LocalBackend(whitelist=whitelist)
    if section.remember_commands and memo_dir is not None:
        from swe_lightning.sandbox.memo import RememberingBackend

        backend = RememberingBackend(backend, section.remember_commands, memo_dir)
    if section.keep is not None:
        from swe_lightning.sandbox.keep import KeepingBackend

        backend = KeepingBackend(backend, section.keep)
    return backend
