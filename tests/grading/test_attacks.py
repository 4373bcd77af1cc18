"""Patches that try to win without fixing anything. Each must grade 0, and none may look like a broken machine."""

from __future__ import annotations

import pytest

from swe_lightning import recipe
from swe_lightning.grading import Grader, Verdict
from swe_lightning.records import Task
from swe_lightning.sandbox import FileState, TreeDiff
from swe_lightning.sandbox.local import LocalBackend

from .conftest import BUG, CLEAN, FIX, make_task

CORE = "calc/core.py"
BUGGY = BUG[CORE].encode()
ALL_PASS = b"""
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    report = result.get_result()
    report.outcome = "passed"
    report.longrepr = None
"""
PASSING_TEST = b"def test_add():\n    pass\n"


def code(text: str) -> TreeDiff:
    """The buggy module with `text` run when it is imported."""
    return {CORE: FileState(BUGGY + b"\n" + text.encode())}


def files(**named: bytes) -> TreeDiff:
    return {name: FileState(data) for name, data in named.items()}


# name -> (changes, what must be dropped; None = all)
DROPPED: dict[str, tuple[TreeDiff, list[str] | None]] = {
    "conftest that passes everything": (files(**{"conftest.py": ALL_PASS}), ["conftest.py"]),
    "conftest beside the tests": (files(**{"tests/conftest.py": ALL_PASS}), ["tests/conftest.py"]),
    "pytest.ini that deselects": (files(**{"pytest.ini": b"[pytest]\naddopts = -k test_mul\n"}), ["pytest.ini"]),
    "pytest settings in pyproject": (
        files(**{"pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-p calc.core'\n"}),
        ["pyproject.toml"],
    ),
    "tox.ini and setup.cfg": (
        files(**{"tox.ini": b"[pytest]\naddopts=-k x\n", "setup.cfg": b"[tool:pytest]\naddopts=-k x\n"}),
        ["setup.cfg", "tox.ini"],
    ),
    "sitecustomize": (
        files(**{"sitecustomize.py": b"import os\nos._exit(0)\n", "usercustomize.py": b""}),
        ["sitecustomize.py", "usercustomize.py"],
    ),
    "path file": (files(**{"calc.pth": b"import os; os._exit(0)\n"}), ["calc.pth"]),
    "test whose name is not UTF-8": ({"tests/\udcff_test.py": FileState(PASSING_TEST)}, ["tests/\udcff_test.py"]),
    "weakened test": (files(**{"tests/test_add.py": PASSING_TEST}), ["tests/test_add.py"]),
    "deleted tests": (dict.fromkeys(["tests/test_add.py", "tests/test_mul.py"]), None),
    "test through a symlink": (
        {"calc/easy.py": FileState(PASSING_TEST), "tests/test_add.py": FileState(b"../calc/easy.py", 0o777, True)},
        ["tests/test_add.py"],
    ),
    "tests directory replaced by a symlink": (
        {"easy/test_add.py": FileState(PASSING_TEST), "tests": FileState(b"easy", 0o777, True)},
        ["easy/test_add.py", "tests"],
    ),
    "file written through a symlink": (
        {"alias": FileState(b"tests", 0o777, True), "alias/test_add.py": FileState(PASSING_TEST)},
        ["alias/test_add.py"],
    ),
    "own pytest": (
        files(**{"pytest.py": b"print('2 passed')\n", "_pytest/__init__.py": b"", "json.py": b"1/0\n"}),
        None,
    ),
    "directories in the place of protected files": (
        files(**{"conftest.py/x": b"", "setup.cfg/x.py": b"", "pyproject.toml/x": b"", "tests/test_add.py/x": b""}),
        None,
    ),
    "settings beside the package": (
        files(**{
            "calc/pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-p calc.cheat'\n",
            "pyproject.toml": CLEAN["pyproject.toml"].encode() + b"entry-points.pytest11.c = 'calc.core'\n",
            "tox.toml": b"env_list = []\n",
        }),
        None,
    ),
    "metadata of a package that is a plugin": (
        files(**{"c.dist-info/METADATA": b"Name: c\n", "c.dist-info/entry_points.txt": b"[pytest11]\nc = calc.core\n"}),
        None,
    ),
    "libraries of the runner": (files(**{"tomli.py": b"", "attr/__init__.py": b"", "numpy/testing.py": b""}), None),
    "compiled test": (files(**{"tests/__pycache__/test_add.cpython-311.pyc": b"x"}), None),
    "path outside the tree": (files(**{"../../tmp/x.py": b"", "calc/../tests/test_add.py": PASSING_TEST}), None),
}  # fmt: skip

ALIVE: dict[str, TreeDiff] = {
    "exit code 0 at import": code("import os; os._exit(0)"),
    "exit code 0 at exit": code("import atexit, os; atexit.register(os._exit, 0)"),
    "sys.exit": code("import sys; sys.exit(0)"),
    "printed results": code(
        "import os\nprint('tests/test_add.py::test_add PASSED\\n2 passed in 0.1s', flush=True)\nos._exit(0)"
    ),
    "forged result files": code(
        "import glob, os\n"
        "for place in glob.glob('/tmp/swel_*'):\n"
        "    with open(place + '/proof', 'a') as f:\n"
        "        f.write('eJxLzs8tKEotLk5NAQAYYQSO ' + '0' * 64 + '\\n')\n"
        "os._exit(0)"
    ),
    "proof removed": code("import glob, os, shutil\n[shutil.rmtree(p) for p in glob.glob('/tmp/swel_*')]\nos._exit(0)"),
    "reports rewritten in place": code(
        "import _pytest.reports\n"
        "was = _pytest.reports.TestReport.from_item_and_call.__func__\n"
        "def always(cls, item, call):\n"
        "    report = was(cls, item, call)\n"
        "    report.outcome, report.longrepr = 'passed', None\n"
        "    return report\n"
        "_pytest.reports.TestReport.from_item_and_call = classmethod(always)"
    ),
    "hook added while running": code(
        "import gc\n"
        "class Always:\n"
        "    def pytest_runtest_logreport(self, report):\n"
        "        report.outcome, report.longrepr = 'passed', None\n"
        "[m for m in gc.get_objects() if type(m).__name__ == 'PytestPluginManager'][0].register(Always())"
    ),
    "tests never called": code("import _pytest.python\n_pytest.python.Function.runtest = lambda self: None"),
    "tests never called, other code in the same function": code(
        "import _pytest.python\n_pytest.python.Function.runtest.__code__ = (lambda self: None).__code__"
    ),
    "test rewritten before it is read": {
        "calc/core.py": FileState(BUGGY),
        "calc/__init__.py": FileState(
            b"from calc.core import add, mul\nimport os\nos.chdir('/testbed')\n"
            b"with open('tests/test_mul.py', 'w') as f:\n    f.write('def test_mul(): pass')\n"
        ),
    },
    "excused as an expected failure": code("import pytest\ndef add(a, b): pytest.xfail('known')"),
    "skipped": code("import pytest\npytest.skip('not today', allow_module_level=True)"),
    "session ended early": code("import pytest\npytest.exit('enough', returncode=0)"),
    "child that reports again": code(
        "import os\ndef add(a, b):\n    if os.fork() == 0:\n        return a + b\n    os.wait()\n    return a - b"
    ),
    "a process left behind": code(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    ),
}  # fmt: skip


REGISTER = "[m for m in gc.get_objects() if type(m).__name__ == 'PytestPluginManager'][0].register("
FORGED_BYTECODE = """
import glob, importlib.util, marshal, os
import _pytest.assertion.rewrite as rewrite
file, = glob.glob(os.getcwd() + '/tests/test_add.py')
digest = importlib.util.source_hash(open(file, 'rb').read())
os.makedirs('tests/__pycache__', exist_ok=True)
with open('tests/__pycache__/test_add' + rewrite.PYC_TAIL, 'wb') as f:
    f.write(importlib.util.MAGIC_NUMBER + bytes([3, 0, 0, 0]) + digest)
    f.write(marshal.dumps(compile('def test_add(): pass', file, 'exec')))
"""
EARLY = {
    "hook before the session": code(
        "import gc\nclass Always:\n"
        "    def pytest_runtest_logreport(self, report): report.outcome, report.longrepr = 'passed', None\n"
        f"{REGISTER}Always())"
    ),
    "hook that claims to be a conftest": code(
        "import gc\nspace = {}\n"
        "text = 'class A:\\n def pytest_runtest_logreport(_, report): report.__dict__.update(outcome=\"passed\")'\n"
        "exec(compile(text, 'tests/conftest.py', 'exec'), space)\n"
        f"{REGISTER}space['A']())"
    ),
    "tests exchanged when collected": code(
        "import gc\nclass Always:\n    def pytest_collection_modifyitems(self, items):\n"
        f"        for item in items: item.obj = lambda: None\n{REGISTER}Always())"
    ),
    "forged bytecode of a test": code(FORGED_BYTECODE),
    "assertions taken out when compiled": code(
        "import _pytest.assertion.rewrite as r\nr.AssertionRewriter.visit_Assert = lambda self, node: []"
    ),
    "approximately everything": code(
        "import pytest\nclass E:\n    def __eq__(self, other): return True\npytest.approx = lambda *a, **k: E()"
    ),
    "expected failure in the name of a test file": code(
        "import pytest\nspace = {'pytest': pytest}\n"
        "exec(compile('def add(a, b): pytest.xfail(str(a))', 'tests/test_add.py', 'exec'), space)\nadd = space['add']"
    ),
}  # fmt: skip
"""Code that runs when a conftest imports the package: before any test file is read."""


@pytest.fixture(scope="module")
def early_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    test = "import pytest\nfrom calc import add\n\n\ndef test_add():\n    assert add(2, 3) == pytest.approx(5)\n"
    clean = {**CLEAN, "tests/conftest.py": "import calc\n", "tests/test_add.py": test}
    return make_task(tmp_path_factory.mktemp("early") / "calc", clean=clean)


def assert_worth_nothing(verdict: Verdict) -> None:
    assert (verdict.resolved, verdict.reward) == (False, 0.0)
    assert verdict.f2p == {"tests/test_add.py::test_add": False}
    assert verdict.why


@pytest.mark.parametrize("name", DROPPED)
def test_is_dropped_and_named(grader: Grader, task: Task, name: str) -> None:
    diff, expected = DROPPED[name]
    verdict = grader.grade(task, diff)
    assert_worth_nothing(verdict)
    assert verdict.dropped_paths == (sorted(diff) if expected is None else expected)


@pytest.mark.parametrize("name", ALIVE)
def test_runs_and_gains_nothing(grader: Grader, task: Task, name: str) -> None:
    verdict = grader.grade(task, ALIVE[name])
    assert_worth_nothing(verdict)
    assert verdict.dropped_paths == []


@pytest.mark.parametrize("name", EARLY)
def test_runs_before_the_tests_are_read_and_gains_nothing(grader: Grader, early_task: Task, name: str) -> None:
    assert_worth_nothing(grader.grade(early_task, EARLY[name]))


def test_a_fix_of_a_package_that_its_conftest_imports(grader: Grader, early_task: Task) -> None:
    diff = files(**{CORE: FIX, "tests_support/data.py": b"", "calc/pyproject.toml": b"[project]\nname = 'sub'\n"})
    verdict = grader.grade(early_task, diff)
    assert (verdict.resolved, verdict.dropped_paths) == (True, [])


def test_dropped_files_do_not_spoil_a_real_fix(grader: Grader, task: Task) -> None:
    diff: TreeDiff = {CORE: FileState(FIX), "tests": FileState(b"calc", 0o777, True), "conftest.py": FileState(b"1/0")}
    verdict = grader.grade(task, diff)
    assert verdict.resolved
    assert verdict.dropped_paths == ["conftest.py", "tests"]


def test_file_in_the_place_of_a_directory_with_tests(backend: LocalBackend, task: Task) -> None:
    nested = task.model_copy(update={"FAIL_TO_PASS": ["tests/test_add.py::test_add"]})
    diff: TreeDiff = {"calc": FileState(b"gone"), "calc/core.py": None, "calc/__init__.py": None}
    verdict = Grader(backend, recipe.Grading()).grade(nested, diff)
    assert_worth_nothing(verdict)


def test_pyproject_may_change_outside_the_test_settings(grader: Grader, task: Task) -> None:
    project = b"[project]\nname = 'calc'\nversion = '2'\n"
    verdict = grader.grade(task, {CORE: FileState(FIX), "pyproject.toml": FileState(project)})
    assert verdict.resolved
    assert verdict.dropped_paths == []
