"""Which test files run which function: one clean run under a profiler, inside a box.

With it a bug is tried only against the test files that can notice it. The recorder is a pytest plugin put into the
tree for that one run; it writes (test file, source file, line of `def`) triples. Where it fails (a package that
replaces the profiler) the answer is "unknown" and every test is run.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

from data_pipeline.testbed import Testbed
from swe_lightning.paths import home
from swe_lightning.rundir import write_atomic

PLUGIN = "swel_callmap"
REPORT = "/tmp/swel_callmap.json"

_SOURCE = '''\
"""Records which functions of this tree each test file calls."""
import json, os, sys, threading

ROOT = os.getcwd() + os.sep
found, current = {}, [None]


def watch(frame, event, _):
    if event == "call":
        calls.add(frame.f_code)


calls = set()


def flush():
    sys.setprofile(None)
    files = found.setdefault(current[0] or "", set())
    for code in calls:
        path = os.path.abspath(code.co_filename)
        if path.startswith(ROOT) and path.endswith(".py"):
            files.add((path[len(ROOT):], code.co_firstlineno))
    calls.clear()


def switch(name):
    flush()
    current[0] = name
    sys.setprofile(watch)
    threading.setprofile(watch)


def pytest_collectstart(collector):
    if type(collector).__name__ == "Module":
        switch(collector.nodeid)


def pytest_runtest_protocol(item):
    name = item.nodeid.split("::", 1)[0]
    if name != current[0]:
        switch(name)


def pytest_sessionfinish():
    threading.setprofile(None)
    flush()
    with open("REPORT", "w") as f:
        json.dump([[name, path, line] for name, seen in found.items() for path, line in sorted(seen)], f)


switch("")
'''.replace("REPORT", REPORT)


def tests_by_function(bed: Testbed, package: Any, *, timeout_s: float) -> dict[tuple[str, int], frozenset[str]]:
    """(source file, line of the first decorator or `def`) -> test files; {} where it cannot be told."""
    name = hashlib.sha256(f"{bed.digest}{bed.plan}{_SOURCE}".encode()).hexdigest()[:32]
    cached = home() / "callmaps" / f"{name}.json"
    if cached.exists():
        triples = json.loads(cached.read_text())
    else:
        triples = _record(bed, timeout_s)
        cached.parent.mkdir(exist_ok=True)
        write_atomic(cached, json.dumps(triples))
    test_files = {test for test, _, _ in triples if test}
    table: dict[tuple[str, int], set[str]] = defaultdict(set)
    for test, path, line in triples:
        # What runs before any test file is known (conftest, plugins) may matter to all of them.
        table[path, line] |= {test} if test else test_files
    return {place: frozenset(tests) for place, tests in table.items()}


def _record(bed: Testbed, timeout_s: float) -> list[list[Any]]:
    box = bed.fresh_box({f"{PLUGIN}.py": _SOURCE.encode()})
    try:
        command = f'PYTHONPATH=$PWD:$PYTHONPATH {bed.plan.command} --rootdir="$PWD" -p {PLUGIN}'
        box.run(command, timeout_s=5 * timeout_s, env=dict(bed.plan.env))
        result = box.run(f"cat {REPORT}", timeout_s=20)
        return json.loads(result.output) if result.exit_code == 0 else []
    except ValueError:
        return []
    finally:
        box.destroy()
