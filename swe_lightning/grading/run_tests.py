"""Runs a pytest command in a box and tells apart: tests passed, tests failed, the session never ended.

Statuses come from our own recorder inside the test process (session_recorder.py), never from printed lines. A run is
`finished` only if the recorder's sealed result is there, was made with this run's secret, names the exit code the box
reported, and no test file changed while the tests ran. So printed "PASSED" lines, `os._exit(0)` and forged result
files are worth nothing. What it does not refuse: an agent that searches the test process's memory for the secret.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
import secrets
import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from swe_lightning.sandbox import FileState, Sandbox, TreeDiff

DEFAULT_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""The box holds pytest alone; a task that needs its plugins says so in its test_env."""

_PASSED_SUMMARY = re.compile(rb"\b[1-9]\d* passed\b")
_SEPARATOR = b"\n--proof--\n"
_START = b"swel-start "
_TEST_DIRS = {"tests", "test"}


@dataclass
class TestRun:
    """One session. `statuses`: test id -> PASSED, FAILED, ERROR, SKIPPED, XFAIL or XPASS (a collection error is an
    ERROR of the file's id). Only believe them when `finished`; `why` says what is wrong otherwise."""

    __test__ = False

    statuses: dict[str, str]
    finished: bool
    exit_code: int
    timed_out: bool
    log: bytes
    seconds: float
    started: bool = False
    """The recorder was loaded. Not started but not timed out: the command never reached our pytest plugin."""
    why: str = ""

    @property
    def unparsed(self) -> bool:
        """The log claims passed tests but the recorder was never there: the machine's fault, not a wrong answer."""
        return not self.started and _PASSED_SUMMARY.search(self.log) is not None


def run_tests(
    box: Sandbox, test_cmd: str, test_ids: Sequence[str], *, env: Mapping[str, str], timeout_s: float
) -> TestRun:
    """Run exactly `test_ids` (empty: all that `test_cmd` collects) from the tree's root.

    An id without `::` stands for a whole file. Asked ids that did not run are absent from `statuses`. Raises
    SandboxLost if the box dies.
    """
    began = time.monotonic()
    name, key = f"swel_{secrets.token_hex(8)}", secrets.token_bytes(32)
    files = test_files(test_ids)
    box.write(_payload(name, key, test_ids, files))
    full_env = {**DEFAULT_ENV, **env}
    command = _command(name, test_cmd, bool(test_ids), full_env.get("PYTHONPATH", ""))
    result = box.run(command, timeout_s=timeout_s, env=full_env)
    run = TestRun({}, False, result.exit_code, result.timed_out, result.output, time.monotonic() - began)
    run.log, at = _cut_start(result.output)
    if result.timed_out:
        run.why = f"tests timed out after {timeout_s:g} s"
        return run
    reply = box.run(_collect_command(name, files, at), timeout_s=60)
    changed, _, proof = reply.output.partition(_SEPARATOR)
    records = list(_unseal(proof, key))
    run.seconds = time.monotonic() - began
    run.started = bool(records)
    run.why = _judge(records, result.exit_code, changed.strip())
    if len(records) > 1 and not run.why:
        run.finished = True
        run.statuses = _asked(records[1]["statuses"], test_ids)
    return run


def test_files(test_ids: Sequence[str]) -> list[str]:
    """The files of the ids, in order of first mention, relative to the tree's root."""
    return list(dict.fromkeys(posixpath.normpath(i.strip().split("::", 1)[0]) for i in test_ids if i.strip()))


test_files.__test__ = False  # type: ignore[attr-defined]


@cache
def _recorder_source() -> str:
    return (Path(__file__).parent / "session_recorder.py").read_text(encoding="utf-8")


def _payload(name: str, key: bytes, test_ids: Sequence[str], files: list[str]) -> TreeDiff:
    """Files that the command moves out of the tree before anything runs."""
    head = f"KEY = {key.hex()!r}\nHOME = {f'/tmp/{name}'!r}\n"
    payload: TreeDiff = {f"{name}/plugin/{name}.py": FileState((head + _recorder_source()).encode(), 0o600)}
    if test_ids:
        payload[f"{name}/files"] = FileState(
            b"".join(f.encode("utf-8", "surrogateescape") + b"\0" for f in files), 0o600
        )
    if any("::" in i for i in test_ids):
        whole = {i.strip() for i in test_ids if "::" not in i}
        if not whole:
            payload[f"{name}/ids"] = FileState(json.dumps([i.strip() for i in test_ids]).encode(), 0o600)
    return payload


def _command(name: str, test_cmd: str, only_files: bool, python_path: str) -> str:
    """bash: hide the recorder outside the tree, name the moment, run the command on the files that exist."""
    path = f"{python_path}:/tmp/{name}/plugin" if python_path else f"/tmp/{name}/plugin"
    lines = [
        f"mv {name} /tmp/ || exit 97",
        f'echo "{_START.decode()}${{EPOCHREALTIME:-$(date +%s.%N)}}"',
        "swel_root=$PWD; swel_args=()",
    ]
    if only_files:
        lines += [
            f'while IFS= read -r -d "" f; do [ -e "$f" ] && swel_args+=("$swel_root/$f"); done < /tmp/{name}/files',
            '[ ${#swel_args[@]} -gt 0 ] || { echo "none of the test files exists"; exit 5; }',
        ]
    lines += [
        f"export PYTHONPATH={shlex.quote(path)}",
        f'{test_cmd} -p {name} -p no:cacheprovider --rootdir="$swel_root" --maxfail=0 '
        '--continue-on-collection-errors "${swel_args[@]}"',
    ]
    return "\n".join(lines)


def _collect_command(name: str, files: list[str], since: str) -> str:
    """Name test files whose inode changed since the start (ctime cannot be set back), then print the proof."""
    folders = {posixpath.dirname(f) for f in files}
    deep = sorted(d for d in folders if _TEST_DIRS & set(d.split("/")))
    flat = sorted(d or "." for d in folders - set(deep))
    finds = []
    if since and deep:
        finds.append(f"find {_quoted(deep)} -name '*.py' -newerct @{since} -print -quit")
    if since and flat:
        names = r"\( -name 'test*.py' -o -name '*_test.py' -o -name conftest.py \)"
        finds.append(f"find {_quoted(flat)} -maxdepth 1 {names} -newerct @{since} -print -quit")
    finds.append(f"printf '\\n--proof--\\n'; cat /tmp/{name}/proof 2>/dev/null; rm -rf /tmp/{name}")
    return " 2>/dev/null; ".join(finds)


def _quoted(paths: list[str]) -> str:
    return " ".join(shlex.quote(f"./{p}") for p in paths)


def _cut_start(output: bytes) -> tuple[bytes, str]:
    """Split off the first line, printed before any code of the tree ran: the box's own clock."""
    first, _, rest = output.partition(b"\n")
    if first.startswith(_START):
        return rest, first[len(_START) :].decode("ascii", "replace").strip()
    return output, ""


def _unseal(proof: bytes, key: bytes) -> Any:
    for line in proof.splitlines():
        text, _, mac = line.partition(b" ")
        wanted = hashlib.blake2b(text, key=key, digest_size=32).hexdigest().encode()
        if secrets.compare_digest(mac, wanted):
            yield json.loads(zlib.decompress(base64.b64decode(text)))


def _judge(records: list[dict[str, Any]], exit_code: int, changed: bytes) -> str:
    """What is wrong with this session, or an empty string."""
    if not records:
        return f"the test session did not start (exit code {exit_code})"
    if len(records) == 1:
        return f"the test session did not finish (exit code {exit_code})"
    result = records[1]
    if len(records) > 2:
        return "the test session reported more than once"
    if result["exit"] != exit_code:
        return f"the test session ended with {result['exit']} but the process with {exit_code}"
    if result["replaced"]:
        return f"the test runner was changed while the tests ran: {result['replaced']}"
    if changed:
        return f"a test file changed while the tests ran: {changed.decode('utf-8', 'replace')}"
    return ""


def _asked(statuses: dict[str, str], test_ids: Sequence[str]) -> dict[str, str]:
    """Statuses under the ids as they were asked for; all of them where whole files were."""
    by_id = {nodeid.strip(): status for nodeid, status in statuses.items()}
    if not test_ids or any("::" not in i for i in test_ids):
        return by_id
    errors = {i: by_id[f] for i in test_ids if (f := i.split("::", 1)[0].strip()) in by_id}
    return {**errors, **{i: by_id[i.strip()] for i in test_ids if i.strip() in by_id}}
