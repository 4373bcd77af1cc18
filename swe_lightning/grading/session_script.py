"""The bash script of one test session, and the files it needs in the box.

The files come in under one random folder name and are moved out of the tree before anything runs. Markers around the
tests' output carry a nonce that is read from a file and deleted before any code of the tree runs: it is in no argument
list, environment or file while the tests run, so nothing a test prints can end or restart the session.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from swe_lightning.grading.apply_patch import parents
from swe_lightning.grading.eval_command import EvalCommand
from swe_lightning.sandbox import FileState, TreeDiff

START = b"swel-start "
BEGIN, END = b"swel-begin ", b"swel-end "
PROOF = b"\n--proof--\n"
_TEST_DIRS = {"tests", "test"}
_STEERING = ("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py")
"""Looked for in every directory above a test: what a set-up that runs the tree's code could add."""
RECORDER_OPTIONS = '-p no:cacheprovider --rootdir="$swel_root" --maxfail=0 --continue-on-collection-errors'


@cache
def _recorder_source() -> str:
    return (Path(__file__).parent / "session_recorder.py").read_text(encoding="utf-8")


def payload(name: str, key: bytes, nonce: str, spec: EvalCommand, ids: Sequence[str], files: list[str]) -> TreeDiff:
    """What the script moves out of the tree. `ids` and `files` matter where the command takes them."""
    found: TreeDiff = {f"{name}/nonce": FileState(nonce.encode() + b"\n", 0o600)}
    if spec.pytest:
        head = f"KEY = {key.hex()!r}\nHOME = {f'/tmp/{name}'!r}\n"
        found[f"{name}/plugin/{name}.py"] = FileState((head + _recorder_source()).encode(), 0o600)
    if not spec.takes_ids or not ids:
        return found
    listed = b"".join(f.encode("utf-8", "surrogateescape") + b"\0" for f in files)
    found[f"{name}/files"] = FileState(listed, 0o600)
    if all("::" in i for i in ids):
        found[f"{name}/ids"] = FileState(json.dumps([i.strip() for i in ids]).encode(), 0o600)
    return found


def script(name: str, spec: EvalCommand, *, only_files: bool) -> str:
    """bash: hide the files, name the moment, set up, run the command between the markers, end with its exit code."""
    command = spec.command
    if spec.pytest:
        command = f"{command} -p {name} {RECORDER_OPTIONS}"
    lines = [
        f"mv {name} /tmp/ || exit 97",
        f"read -r swel_nonce < /tmp/{name}/nonce; rm -f /tmp/{name}/nonce",
        f'echo "{START.decode()}${{EPOCHREALTIME:-$(date +%s.%N)}}"',
        "swel_root=$PWD; swel_args=()",
    ]
    if spec.takes_ids and only_files:
        command += ' "${swel_args[@]}"'
        lines += [
            f'while IFS= read -r -d "" f; do [ -e "$f" ] && swel_args+=("$swel_root/$f"); done < /tmp/{name}/files',
            '[ ${#swel_args[@]} -gt 0 ] || { echo "none of the test files exists"; exit 5; }',
        ]
    lines += _set_up(name, spec)
    if spec.pytest:
        lines.append(f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}/tmp/{name}/plugin"')
    lines += [
        f'echo "{BEGIN.decode()}$swel_nonce"',
        command,
        "swel_code=$?",
        f'echo; echo "{END.decode()}$swel_nonce $swel_code"; exit $swel_code',
    ]
    return "\n".join(lines)


def _set_up(name: str, spec: EvalCommand) -> list[str]:
    """The set-up may run code of the tree (setup.py): meanwhile the recorder, which holds the key, is in no file."""
    if not spec.setup:
        return []
    lines = [*spec.setup, 'cd "$swel_root"']
    if not spec.pytest:
        return lines
    folder, file = f"/tmp/{name}/plugin", f"/tmp/{name}/plugin/{name}.py"
    return [
        f"swel_plugin=$(<{file}) && rm -rf {folder} || exit 97",
        *lines,
        f"(umask 077; rm -rf {folder}; mkdir {folder} && printf '%s\\n' \"$swel_plugin\" > {file}) || exit 97",
        "unset swel_plugin",
    ]


def collect_script(name: str, files: Sequence[str], since: str) -> str:
    """Name test files whose inode changed since the start (ctime cannot be set back), then print the proof."""
    folders = {posixpath.dirname(f) or "." for f in files}
    deep = {d for d in folders if _TEST_DIRS & set(d.split("/"))}
    looks = [
        (deep, "-name '*.py'"),
        (folders - deep, f"-maxdepth 1 {_named('test*.py', '*_test.py')}"),
        ({d for f in folders for d in (f, ".", *parents(f))}, f"-maxdepth 1 {_named(*_STEERING)}"),
    ]
    finds = [
        f"find {_quoted(sorted(places))} {what} -newerct @{since} -print -quit"
        for places, what in looks
        if since and places and folders
    ]
    finds.append(f"printf '\\n--proof--\\n'; cat /tmp/{name}/proof 2>/dev/null; rm -rf /tmp/{name}")
    return " 2>/dev/null; ".join(finds)


def cut(output: bytes, nonce: str) -> tuple[str, bytes, int | None]:
    """(the box's own clock at the start, what the tests wrote, the exit code in the end marker or None)."""
    at = ""
    first, _, rest = output.partition(b"\n")
    if first.startswith(START):
        at, output = first[len(START) :].decode("ascii", "replace").strip(), rest
    begin = BEGIN + nonce.encode() + b"\n"
    output = output.partition(begin)[2] if begin in output else output
    body, mark, code = output.rpartition(b"\n" + END + nonce.encode() + b" ")
    if not mark or not code.strip().isdigit():
        return at, output, None
    return at, body, int(code)


def _named(*patterns: str) -> str:
    return r"\( " + " -o ".join(f"-name {shlex.quote(p)}" for p in patterns) + r" \)"


def _quoted(paths: Sequence[str]) -> str:
    return " ".join(shlex.quote(f"./{p}") for p in paths)
