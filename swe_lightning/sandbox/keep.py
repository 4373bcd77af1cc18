"""Leave each box's tree behind for a person to look at: `sandbox.keep: DIRECTORY`, `swel grade --keep DIRECTORY`.

A box itself never outlives its owner, so what is kept is the tree as the box had it, as ordinary files, beside a list
of what changed and of what a patch could not carry. Works over any backend. It costs a copy of the tree per box.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from swe_lightning.errors import SandboxLost
from swe_lightning.sandbox.base import Backend, ExecResult, Limits, Sandbox, TreeDiff
from swe_lightning.services import Service

log = logging.getLogger("swel.sandbox")


class KeepingBackend:
    def __init__(self, backend: Backend, directory: Path) -> None:
        self.backend, self.directory = backend, directory
        self._numbers = itertools.count(1)

    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        label: str = "",
        files: Mapping[str, bytes] = {},
        gateway: Service | None = None,
        image: str = "",
    ) -> KeptSandbox:
        box = self.backend.create(tree, env=env, limits=limits, label=label, files=files, gateway=gateway, image=image)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", label) or "box"
        place = self.directory / f"{name}-{os.getpid()}-{next(self._numbers)}"
        return KeptSandbox(box, tree, files, place)

    def gc(self, label: str | None = None) -> int:
        return self.backend.gc(label)

    def close(self) -> None:
        self.backend.close()


class KeptSandbox:
    def __init__(self, box: Sandbox, tree: Path, files: Mapping[str, bytes], place: Path) -> None:
        self._box, self._tree, self._files, self.place = box, tree, files, place
        self.left_out: list[str] = []
        self._open = True

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        return self._box.run(command, timeout_s=timeout_s, env=env)

    def read_file(self, path: str) -> bytes:
        return self._box.read_file(path)

    def write(self, changes: TreeDiff) -> None:
        self._box.write(changes)

    def diff(self) -> TreeDiff:
        found = self._box.diff()
        self.left_out = self._box.left_out
        return found

    def destroy(self) -> None:
        if self._open:
            self._open = False
            try:
                save(self._tree, self._files, self.diff(), self.left_out, self.place)
                log.warning("kept the tree of a sandbox", extra={"place": str(self.place)})
            except (
                SandboxLost,
                OSError,
            ) as error:  # a box that died leaves nothing; a full disk must not hide a verdict
                log.warning("could not keep the tree of a sandbox", extra={"why": str(error)})
        self._box.destroy()

    def __enter__(self) -> KeptSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def save(tree: Path, files: Mapping[str, bytes], diff: TreeDiff, left_out: list[str], place: Path) -> None:
    """`place`/tree: the base with its extra files and the changes; `place`/changes.txt: what changed."""
    target = place / "tree"
    place.mkdir(parents=True)
    shutil.copytree(tree, target, symlinks=True)
    for name, data in files.items():
        _clear(target, name).write_bytes(data)
    # A repository of the agent's would run the agent's programs as soon as a person's shell prompt asks git about it.
    left_out = left_out + [f"{n}: part of a .git" for n in diff if ".git" in n.lower().split("/")]
    diff = {n: state for n, state in diff.items() if ".git" not in n.lower().split("/")}
    for name, state in sorted(diff.items(), key=lambda item: item[1] is not None):  # a file may replace a directory
        path = _clear(target, name)
        if state is None:
            continue
        if state.symlink:
            os.symlink(os.fsdecode(state.data), path)
        else:
            path.write_bytes(state.data)
            path.chmod(state.mode)
    lines = [f"{'deleted' if state is None else 'changed'} {name!r}" for name, state in diff.items()]
    lines += [f"left out {note!r}" for note in left_out]
    (place / "changes.txt").write_text(
        "".join(line + "\n" for line in lines), encoding="utf-8", errors="backslashreplace"
    )


def _clear(root: Path, name: str) -> Path:
    """The path of `name` with directories above it and nothing at it; a link or file on the way is replaced."""
    here = root
    *parents, last = name.split("/")
    for part in parents:
        here = here / part
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            here.unlink()
        here.mkdir(exist_ok=True)
    path = here / last
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path
