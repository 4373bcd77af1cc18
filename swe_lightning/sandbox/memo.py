"""Run a deterministic command once per tree state; replay it afterwards.

The recipe names, by a regex of whole commands, what it vouches to be deterministic and free of shell state: output,
exit code and effect on the tree follow from the tree alone. Such a command seen before in the same state (base tree,
files, environment, changes so far) is answered from disk, without a box. `a; b` of such commands is two of them. The
first command outside the regex gets a real box brought to the current state, and from then on everything is real.

Never remembered: timeouts, lost boxes, states a diff cannot carry. Never used for verdicts.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from swe_lightning import paths
from swe_lightning.errors import RecipeError, SandboxLost
from swe_lightning.locks import once
from swe_lightning.sandbox.base import Backend, ExecResult, FileState, Limits, Sandbox, TreeDiff
from swe_lightning.sandbox.boxside.wire import pack, unpack
from swe_lightning.sandbox.treediff import BaseTree
from swe_lightning.services import Service

FORMAT = b"3"


class RememberingBackend:
    """Wraps a backend; `directory` may be shared by processes: entries appear whole or not at all."""

    def __init__(self, backend: Backend, pattern: str, directory: Path) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise RecipeError(f"sandbox.remember_commands is not a regular expression: {error}") from error
        self.backend = backend
        self.store = Store(directory)
        self.hits = 0
        self.misses = 0
        self._trees: dict[Path, bytes] = {}

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
    ) -> Sandbox:
        if gateway is not None:  # what the model answers does not follow from the tree
            return self.backend.create(
                tree, env=env, limits=limits, label=label, files=files, gateway=gateway, image=image
            )
        if tree not in self._trees:
            self._trees[tree] = tree_digest(tree)
        identity = digest(
            FORMAT,
            self._trees[tree],
            *(part for name in sorted(files) for part in (_bytes(name), files[name])),
            b"env",
            *(_bytes(part) for item in sorted(env.items()) for part in item),
            repr(limits).encode(),
            image.encode(),
        )
        return RememberingSandbox(self, identity, tree, dict(env), limits, label, dict(files), image)

    def steps(self, command: str) -> list[str]:
        """The commands that `command` consists of, if each may be remembered; else nothing."""
        parts = command.split("; ")
        if all(self.pattern.fullmatch(part) for part in parts):
            return parts
        return [command] if self.pattern.fullmatch(command) else []

    def gc(self, label: str | None = None) -> int:
        return self.backend.gc(label)

    def close(self) -> None:
        self.backend.close()


class RememberingSandbox:
    """`_state` is the tree now; the real box, if there is one, may lag behind it at `_box_state`."""

    def __init__(
        self,
        owner: RememberingBackend,
        identity: bytes,
        tree: Path,
        env: dict[str, str],
        limits: Limits,
        label: str,
        files: dict[str, bytes],
        image: str,
    ) -> None:
        self._image = image
        self._owner, self._identity = owner, identity
        self._tree, self._env, self._limits, self._label, self._files = tree, env, limits, label, files
        self._base = BaseTree(tree, files)
        self._state: TreeDiff = {}
        self._box: Sandbox | None = None
        self._box_state: TreeDiff = {}
        self._real = False
        self._open = True
        self.left_out: list[str] = []

    def run(self, command: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> ExecResult:
        steps = [command] if self._real else self._owner.steps(command)
        if not steps:
            self._real_box()
            self._real = True
            steps = [command]
        output, result = b"", ExecResult(b"", 0)
        for step in steps:
            result = self._step(step, timeout_s, env)
            output += result.output
            if result.timed_out:
                break
        return replace(result, output=output)

    def _step(self, command: str, timeout_s: float, env: Mapping[str, str] | None) -> ExecResult:
        if self._real:
            return self._real_box().run(command, timeout_s=timeout_s, env=env)
        self._check_open()
        extra = [_bytes(part) for item in sorted((env or {}).items()) for part in item]
        key = digest(self._identity, encode_diff(self._state), _bytes(command), *extra)
        found = self._remembered(key)
        if found is None:
            with once(self._owner.store.directory, key.hex()):  # whoever else wants this waits and finds it
                found = self._remembered(key) or self._run_and_remember(command, timeout_s, env, key)
        return found

    def _remembered(self, key: bytes) -> ExecResult | None:
        remembered = self._owner.store.get(key)
        if remembered is None:
            return None
        self._owner.hits += 1
        result, self._state = remembered
        return result

    def _run_and_remember(
        self, command: str, timeout_s: float, env: Mapping[str, str] | None, key: bytes
    ) -> ExecResult:
        self._owner.misses += 1
        box = self._real_box()
        result = box.run(command, timeout_s=timeout_s, env=env)
        after = box.diff()
        if result.timed_out or box.left_out:
            self._real = True
            return result
        self._state = self._box_state = after
        self._owner.store.put(key, result, after)
        return result

    def read_file(self, path: str) -> bytes:
        return self._real_box().read_file(path)

    def write(self, changes: TreeDiff) -> None:
        if self._real:
            self._real_box().write(changes)
            return
        self._check_open()
        state = dict(self._state)
        for path, new in changes.items():
            if new == self._base.get(path):
                state.pop(path, None)
            else:
                state[path] = new
        self._state = dict(sorted(state.items()))

    def diff(self) -> TreeDiff:
        if not self._real:
            self._check_open()
            return dict(self._state)
        box = self._real_box()
        found = box.diff()
        self.left_out = box.left_out
        return found

    def destroy(self) -> None:
        self._open = False
        if self._box is not None:
            self._box.destroy()

    def __enter__(self) -> RememberingSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxLost("the sandbox was destroyed")

    def _real_box(self) -> Sandbox:
        """The box, made now if need be, with the tree in the current state."""
        self._check_open()
        if self._box is None:
            self._box = self._owner.backend.create(
                self._tree,
                env=self._env,
                limits=self._limits,
                label=self._label,
                files=self._files,
                image=self._image,
            )
        if not self._real and self._box_state != self._state:
            changes: TreeDiff = {}
            for path in {*self._box_state, *self._state}:
                target = self._state[path] if path in self._state else self._base.get(path)
                now = self._box_state[path] if path in self._box_state else self._base.get(path)
                if target != now:
                    changes[path] = target
            self._box.write(changes)
            self._box_state = dict(self._state)
        return self._box


class Store:
    """One file per remembered command, named by its key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, key: bytes) -> tuple[ExecResult, TreeDiff] | None:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        code, flags, output, diff = unpack(data[4:])
        return ExecResult(output, int(code), truncated=flags == b"c"), decode_diff(diff)

    def put(self, key: bytes, result: ExecResult, after: TreeDiff) -> None:
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        flags = b"c" if result.truncated else b""
        data = pack(str(result.exit_code).encode(), flags, result.output, encode_diff(after))
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new.")
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.replace(temporary, path)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name[2:]


def encode_diff(diff: TreeDiff) -> bytes:
    """One byte string per tree state, whatever order its paths came in."""
    fields: list[bytes] = []
    for path in sorted(diff):
        state = diff[path]
        if state is None:
            fields += [os.fsencode(path), b"x", b""]
        else:
            fields += [os.fsencode(path), b"l" if state.symlink else b"%o" % state.mode, state.data]
    return pack(*fields)[4:]


def decode_diff(data: bytes) -> TreeDiff:
    fields, diff = unpack(data), TreeDiff()
    for path, mode, content in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        name = os.fsdecode(path)
        if mode == b"x":
            diff[name] = None
        elif mode == b"l":
            diff[name] = FileState(content, 0o777, symlink=True)
        else:
            diff[name] = FileState(content, int(mode, 8))
    return diff


def digest(*parts: bytes) -> bytes:
    """Digest of a sequence: no two sequences share the hashed bytes."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(struct.pack("!Q", len(part)))
        hashed.update(part)
    return hashed.digest()


def tree_digest(tree: Path) -> bytes:
    """What a tree holds. Exports are named by their content already."""
    if tree.parent == paths.home() / "trees":
        return tree.name.encode()
    base = BaseTree(tree, {})
    return digest(*_states(base, sorted(base.below(""))))


def _states(base: BaseTree, names: list[str]) -> Iterable[bytes]:
    for name in names:
        yield encode_diff({name: base.get(name)})


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
