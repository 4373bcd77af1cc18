"""Runs a test command in a box and tells apart: tests passed, tests failed, the session never ended.

Of a pytest command, statuses come from our own recorder in the test process (session_recorder.py), never from printed
lines. It is `finished` only if the recorder's sealed result is there, was made with this run's secret, names the
exit code the box reported, and no test file changed meanwhile: printed "PASSED" lines, `os._exit(0)` and forged result
files are worth nothing. Any other runner has no recorder: `finished` then means that the shell came back to the end
marker with this run's nonce and the same exit code, and what the tests printed has to be read (saved_log.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swe_lightning.grading import session_script
from swe_lightning.grading.eval_command import EvalCommand
from swe_lightning.sandbox import Sandbox

_PASSED_SUMMARY = re.compile(rb"\b[1-9]\d* passed\b")


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
    recorded: bool = True
    """False: the runner is not pytest, `statuses` is empty and the log is all there is."""
    truncated: bool = False

    @property
    def unparsed(self) -> bool:
        """The log claims passed tests but the recorder was never there: whose fault that is, a control run tells."""
        return not self.started and _PASSED_SUMMARY.search(self.log) is not None


def run_tests(
    box: Sandbox,
    test_cmd: str | EvalCommand,
    test_ids: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    watch: Sequence[str] | None = None,
) -> TestRun:
    """Run exactly `test_ids` (empty: all that `test_cmd` collects) from the tree's root.

    An id without `::` stands for a whole file. Asked ids that did not run are absent from `statuses`. `watch`: the test
    files that must not change meanwhile (default: those of the ids). Raises SandboxLost if the box dies.
    """
    began = time.monotonic()
    spec = EvalCommand(test_cmd) if isinstance(test_cmd, str) else test_cmd
    name, key, nonce = f"swel_{secrets.token_hex(8)}", secrets.token_bytes(32), secrets.token_hex(16)
    files = test_files(test_ids)
    box.write(session_script.payload(name, key, nonce, spec, test_ids, files))
    command = session_script.script(name, spec, only_files=bool(test_ids))
    result = box.run(command, timeout_s=timeout_s, env={**spec.env, **env})
    run = TestRun({}, False, result.exit_code, result.timed_out, result.output, time.monotonic() - began)
    run.recorded, run.truncated = spec.pytest, result.truncated
    at, run.log, marked = session_script.cut(result.output, nonce)
    if result.timed_out:
        run.why = f"tests timed out after {timeout_s:g} s"
        return run
    reply = box.run(session_script.collect_script(name, files if watch is None else watch, at), timeout_s=60)
    changed, _, proof = reply.output.partition(session_script.PROOF)
    run.seconds = time.monotonic() - began
    if not spec.pytest:
        run.started = bool(at)
        run.why = _judge_marker(marked, result.exit_code, changed.strip())
        run.finished = not run.why
        return run
    records = list(_unseal(proof, key))
    run.started = bool(records)
    run.why = _judge(records, result.exit_code, changed.strip())
    if len(records) > 1 and not run.why:
        run.finished = True
        run.statuses = _asked(records[1]["statuses"], test_ids if spec.takes_ids else ())
    return run


def test_files(test_ids: Sequence[str]) -> list[str]:
    """The files of the ids, in order of first mention, relative to the tree's root."""
    return list(dict.fromkeys(posixpath.normpath(i.strip().split("::", 1)[0]) for i in test_ids if i.strip()))


test_files.__test__ = False  # type: ignore[attr-defined]


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
    return _judge_changed(changed)


def _judge_marker(marked: int | None, exit_code: int, changed: bytes) -> str:
    if marked is None:
        return f"the test command did not come to its end (exit code {exit_code})"
    if marked != exit_code:
        return f"the test command ended with {marked} but its shell with {exit_code}"
    return _judge_changed(changed)


def _judge_changed(changed: bytes) -> str:
    return f"a test file changed while the tests ran: {changed.decode('utf-8', 'replace')}" if changed else ""


def _asked(statuses: dict[str, str], test_ids: Sequence[str]) -> dict[str, str]:
    """Statuses under the ids as they were asked for; all of them where whole files were."""
    by_id = {nodeid.strip(): status for nodeid, status in statuses.items()}
    if not test_ids or any("::" not in i for i in test_ids):
        return by_id
    errors = {i: by_id[f] for i in test_ids if (f := i.split("::", 1)[0].strip()) in by_id}
    return {**errors, **{i: by_id[i.strip()] for i in test_ids if i.strip() in by_id}}
