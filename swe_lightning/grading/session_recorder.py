"""Written into the box under a random name and loaded by the test runner with `-p`; never imported on this side.

It records the worst status of every test id and, when the session ends, appends one sealed line to the proof file: a
keyed digest over statuses and exit code. The key exists on disk only until this module is loaded, before any code of
the package under test. A session that did not end leaves no second line, and a line without the key is worth nothing.
It also refuses to seal when core functions of the runner were replaced while the tests ran. It cannot stop code that
searches this process's memory for the key: tests run the model's code in their own process.
"""

import base64
import hashlib
import json
import os
import shutil
import sys
import unittest.case  # noqa: F401 (its functions are watched)
import zlib
from types import FunctionType

import pytest

KEY: str  # both are written above this text for each run
HOME: str

CORE = [
    "_pytest.runner",
    "_pytest.python",
    "_pytest.unittest",
    "_pytest.reports",
    "_pytest.main",
    "_pytest.nodes",
    "_pytest.skipping",
    "_pytest.outcomes",
    "pluggy._callers",
    "pluggy._hooks",
    "pluggy._manager",
    "unittest.case",
]
DECISIVE = (
    "pytest_runtest_protocol",
    "pytest_runtest_call",
    "pytest_pyfunc_call",
    "pytest_runtest_makereport",
    "pytest_runtest_logreport",
    "pytest_runtestloop",
)
WORST_LAST = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")


def core_functions():
    """{(module, name): (function, code)} of what decides whether a test passed."""
    found = {}
    for module_name in [name for name in CORE if name in sys.modules]:
        for name, value in list(vars(sys.modules[module_name]).items()):
            if isinstance(value, FunctionType):
                found[module_name, name] = (value, value.__code__)
            elif isinstance(value, type) and value.__module__ == module_name:
                for attribute, member in list(vars(value).items()):
                    member = getattr(member, "__func__", getattr(member, "fget", member))  # class methods, properties
                    if isinstance(member, FunctionType):
                        found[module_name, f"{name}.{attribute}"] = (member, member.__code__)
    return found


def hook_functions(config):
    """Functions behind the hooks that can change a result."""
    impls = [impl for name in DECISIVE for impl in getattr(config.hook, name).get_hookimpls()]
    return {impl.function for impl in impls}


def make_recorder(key, home):
    ids_file = os.path.join(home, "ids")
    wanted = None
    if os.path.exists(ids_file):
        with open(ids_file, encoding="utf-8") as f:
            wanted = set(json.load(f))
    proof = os.path.join(home, "proof")
    shutil.rmtree(os.path.join(home, "plugin"), ignore_errors=True)
    sys.path[:] = [p for p in sys.path if not p.startswith(home)]
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not p.startswith(home)]
    os.environ.update(PYTHONPATH=os.pathsep.join(path))
    if not path:
        del os.environ["PYTHONPATH"]
    owner = os.getpid()
    statuses: dict[str, str] = {}
    state = {"session": None, "core": core_functions(), "hooks": set(), "replaced": ""}

    def seal(payload):
        text = base64.b64encode(zlib.compress(json.dumps(payload).encode(), 1)).decode()
        mac = hashlib.blake2b(text.encode(), key=key, digest_size=32).hexdigest()
        with open(proof, "a", encoding="ascii") as f:
            f.write(f"{text} {mac}\n")

    def note(nodeid, status):
        before = statuses.get(nodeid, "PASSED")
        statuses[nodeid] = max(before, status, key=WORST_LAST.index)

    def check_core():
        """Note what was replaced since the start, and hooks added since by anything but a conftest."""
        now = core_functions()
        for name, was in state["core"].items():
            is_now = now.get(name)
            if is_now is None or is_now[0] is not was[0] or is_now[1] is not was[1]:
                state["replaced"] = state["replaced"] or ".".join(name)
        for function in hook_functions(state["session"].config) - state["hooks"]:
            code = getattr(function, "__code__", None)
            if code is None or os.path.basename(code.co_filename) != "conftest.py":
                state["replaced"] = state["replaced"] or f"hook {getattr(function, '__name__', function)}"

    def raised_by_tests(item, excinfo):
        """Whether pytest.xfail() was called by a test file: code under test must not excuse its own failures."""
        for entry in reversed(excinfo.traceback):
            path = str(entry.path)
            if os.path.basename(os.path.dirname(path)) != "_pytest":
                parts = path.split(os.sep)
                own = str(getattr(item, "path", None) or item.fspath)  # pytest before 7 has no path
                return path == own or parts[-1] == "conftest.py" or "tests" in parts or "test" in parts
        return False

    class Recorder:
        def pytest_sessionstart(self, session):
            state["session"] = session
            state["hooks"] = hook_functions(session.config)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config, items):
            if wanted is None:
                return
            kept = [item for item in items if item.nodeid.strip() in wanted]
            dropped = [item for item in items if item.nodeid.strip() not in wanted]
            if dropped:
                config.hook.pytest_deselected(items=dropped)
                items[:] = kept

        def pytest_collectreport(self, report):
            if report.failed:
                note(report.nodeid, "ERROR")

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            outcome = yield
            if call.excinfo and isinstance(call.excinfo.value, pytest.xfail.Exception):
                report = outcome.get_result()
                if hasattr(report, "wasxfail") and not raised_by_tests(item, call.excinfo):
                    del report.wasxfail
                    report.outcome = "failed"
                    report.longrepr = "pytest.xfail() called outside the tests"

        @pytest.hookimpl(trylast=True)
        def pytest_runtest_logreport(self, report):
            check_core()
            expected = hasattr(report, "wasxfail")
            if report.failed:
                note(report.nodeid, "FAILED" if report.when == "call" else "ERROR")
            elif report.skipped:
                note(report.nodeid, "XFAIL" if expected else "SKIPPED")
            elif report.when == "call":
                note(report.nodeid, "XPASS" if expected else "PASSED")

        @pytest.hookimpl(trylast=True)
        def pytest_unconfigure(self, config):
            session = state["session"]
            if session is None or os.getpid() != owner or hasattr(config, "workerinput"):
                return
            check_core()
            seal({"exit": int(session.exitstatus), "statuses": statuses, "replaced": state["replaced"]})

    seal({"started": True})
    return Recorder()


RECORDER = make_recorder(bytes.fromhex(KEY), HOME)  # noqa: F821
del KEY  # noqa: F821


def pytest_configure(config):
    config.pluginmanager.register(RECORDER)
    sys.modules.pop(__name__, None)
