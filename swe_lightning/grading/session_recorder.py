"""Written into the box under a random name and loaded by the test runner with `-p`; never imported on this side.

It records the worst status of every test id and, when the session ends, appends one sealed line to the proof file: a
keyed digest over statuses and exit code. The key exists on disk only until this module is loaded, before any code of
the package under test. A session that did not end leaves no second line, and a line without the key is worth nothing.
It also refuses to seal when core functions of the runner were replaced while the tests ran, or hooks were added by
anything but conftest files and installed plugins. It cannot stop code that searches this process's memory for the key:
tests run the model's code in their own process.
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
from typing import Any

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
    "_pytest.assertion",
    "_pytest.assertion.rewrite",
    "_pytest.python_api",
    "_pytest.raises",
    "pytest",
    "pluggy._callers",
    "pluggy._hooks",
    "pluggy._manager",
    "unittest.case",
]
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


def hook_implementations(config):
    """{function: the plugin it came with} of every hook."""
    callers = [caller for name, caller in vars(config.pluginmanager.hook).items() if name.startswith("pytest_")]
    return {impl.function: impl.plugin for caller in callers for impl in caller.get_hookimpls()}


def module_behind(namespace, root, conftests):
    """(the loaded module that `namespace` belongs to, whether it is outside the tree), or (None, False)."""
    for module in [sys.modules.get(namespace.get("__name__")), *conftests]:
        if module is not None and vars(module) is namespace:
            file = os.path.realpath(getattr(module, "__file__", None) or root)
            return module, not (file + os.sep).startswith(root + os.sep)
    return None, False


def from_file(code, module):
    """Whether `code` names the file of the module in whose namespace it runs: text compiled on the way does not."""
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(code.co_filename) == os.path.realpath(file)


def may_hook(function, config, root):
    """Conftest files, the plugins they name, and what is installed outside the tree may add hooks at any time."""
    conftests = list(getattr(config.pluginmanager, "_conftest_plugins", ()))
    named: set[str] = set()
    for conftest in conftests:
        names = getattr(conftest, "pytest_plugins", ())
        named.update([names] if isinstance(names, str) else names)
    module, outside = module_behind(getattr(function, "__globals__", {}), root, conftests)
    if module is None or not from_file(function.__code__, module):
        return False
    return outside or module in conftests or module.__name__ in named


def raised_by_tests(item, traceback, root):
    """Whether a test, not the code under test, called pytest.xfail(): code must not excuse its own failures.

    From the first frame of a test file on, no frame may belong to other files of the tree or to compiled text.
    """
    conftests = list(getattr(item.config.pluginmanager, "_conftest_plugins", ()))
    in_test = False
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        module, outside = module_behind(frame.f_globals, root, [item.module, *conftests])
        if module is not None and not outside and from_file(frame.f_code, module) and is_test_file(item, module):
            in_test = True
        elif in_test and not outside:
            return False
    return in_test


def is_test_file(item, module):
    parts = module.__file__.split(os.sep)
    return module is item.module or parts[-1] == "conftest.py" or "tests" in parts or "test" in parts


def read_no_bytecode():
    """Test files are compiled from their source: a compiled file in the tree could be forged by the code under test."""
    rewrite: Any = sys.modules.get("_pytest.assertion.rewrite")
    if hasattr(rewrite, "_read_pyc"):
        rewrite._read_pyc = lambda *arguments, **named: None


def make_recorder(key, home):
    ids_file = os.path.join(home, "ids")
    wanted = None
    if os.path.exists(ids_file):
        with open(ids_file, encoding="utf-8") as f:
            wanted = set(json.load(f))
    proof = os.path.join(home, "proof")
    root = os.path.realpath(os.getcwd())
    read_no_bytecode()
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
        """Note what was replaced since the start, and hooks added since by what may not."""
        now = core_functions()
        for name, was in state["core"].items():
            is_now = now.get(name)
            if is_now is None or is_now[0] is not was[0] or is_now[1] is not was[1]:
                state["replaced"] = state["replaced"] or ".".join(name)
        config = state["session"].config
        for function in hook_implementations(config):
            if function not in state["hooks"] and not may_hook(function, config, root):
                state["replaced"] = state["replaced"] or f"hook {getattr(function, '__name__', function)}"

    class Recorder:
        def pytest_sessionstart(self, session):
            state["session"] = session
            found = hook_implementations(session.config)
            state["hooks"].update({function for function, plugin in found.items() if plugin is self})

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
                if hasattr(report, "wasxfail") and not raised_by_tests(item, call.excinfo.tb, root):
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

    def remember_hooks(config):
        state["hooks"] = set(hook_implementations(config))

    seal({"started": True})
    return Recorder(), remember_hooks


RECORDER, REMEMBER_HOOKS = make_recorder(bytes.fromhex(KEY), HOME)  # noqa: F821
del KEY  # noqa: F821


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before the first conftest, which imports the code under test."""
    REMEMBER_HOOKS(early_config)


def pytest_configure(config):
    config.pluginmanager.register(RECORDER)
    sys.modules.pop(__name__, None)
