"""The nouns of the room: a Sandbox runs commands on a copy of a tree, a Backend makes sandboxes.

Every backend keeps the same promise, and one test suite holds them to it: the tree is at /testbed and is the working
directory, the user is not root, there is no network (network.py names the exceptions), no git and nothing of the host
beyond the system's own programs; output is bytes, exact and bounded; what a command leaves running dies with its
timeout or with the sandbox.

A sandbox that stops answering raises SandboxLost. It never turns into text that looks like a command's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from swe_lightning.recipe import SandboxSection
from swe_lightning.services import Service

TREE_ROOT = "/testbed"
"""Where the tree lies in every sandbox; also the working directory of every command."""
ORIGINAL_ROOT = "/testbed.orig"
"""The tree as it was given, read-only: what an agent without git compares with and restores from."""


@dataclass(frozen=True)
class ExecResult:
    """What one command did. `output` is stdout and stderr as they came, interleaved.

    `exit_code` is the shell's: 128 + n after signal n, 124 when `timed_out`. When `truncated`, `output` holds the
    beginning and the end, and one line between them says how many bytes were left out.
    """

    output: bytes
    exit_code: int
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class FileState:
    """A file as git would record it: `mode` is 0o755 or 0o644; a symlink has 0o777 and its target as `data`."""

    data: bytes
    mode: int = 0o644
    symlink: bool = False


TreeDiff = dict[str, FileState | None]
"""Path relative to the tree's root -> new state, None = deleted. Names that are not UTF-8 carry surrogate escapes."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. `disk_mb` covers the tree's changes, /tmp and /dev/shm together."""

    cpu: float = 1
    memory_mb: int = 2048
    pids: int = 256
    disk_mb: int = 1024
    output_bytes: int = 1_000_000

    @classmethod
    def of(cls, section: SandboxSection) -> Limits:
        return cls(cpu=section.cpu, memory_mb=section.memory_mb, pids=section.pids, disk_mb=section.disk_mb)


@runtime_checkable
class Sandbox(Protocol):
    left_out: list[str]
    """Paths the last diff() could not carry (devices, pipes, sockets, files beyond the size bound), with the reason."""

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run `command` with bash from the tree's root, stdin closed. On timeout everything in the sandbox is killed.

        Raises SandboxLost if the sandbox died.
        """
        ...

    def read_file(self, path: str) -> bytes:
        """A regular file as the sandbox sees it (relative: to the tree). OSError as `open` would raise it."""
        ...

    def write(self, changes: TreeDiff) -> None:
        """Put files into the tree, or delete them, from the trusted side."""
        ...

    def diff(self) -> TreeDiff:
        """Changes of the tree since create, read outside the sandbox. Empty directories do not count."""
        ...

    def destroy(self) -> None:
        """Idempotent; when it returns, no process of the sandbox is alive."""
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Backend(Protocol):
    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),
        label: str = "",
        files: Mapping[str, bytes] = {},
        gateway: Service | None = None,
        image: str = "",
    ) -> Sandbox:
        """A sandbox on a private copy of `tree`, which is never written to.

        `env` holds for every command. `files` are laid over the tree before the base is recorded: they are part of
        the base, so diff() shows them only when they change. `gateway`: where the
        gateway listens; the box finds it at network.GATEWAY_URL. `image`: what the task's commands need around the
        tree (image_names.task_image); backends without images ignore it. Raises SandboxStartError.
        """
        ...

    def gc(self, label: str | None = None) -> int:
        """Remove what dead owners left behind (all labels, or one); returns how many sandboxes."""
        ...

    def close(self) -> None:
        """Let go of what serves all boxes (connections, probes). Boxes have to be destroyed before."""
        ...
