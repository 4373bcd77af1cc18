"""A reward without a fix: through what is left running, what is left lying, and what tests import.

The whole way of a rollout: the agent's box, its changes, a fresh box, the verdict. tests/grading/test_attacks.py holds
the attacks that need only a patch; here are those that need the box, and those that are known to work.
"""

from __future__ import annotations

import subprocess
import time

import pytest

from swe_lightning import recipe
from swe_lightning.grading import Grader, Verdict
from swe_lightning.records import Task
from swe_lightning.sandbox import Backend, TreeDiff
from swe_lightning.sandbox.trees import agent_tree, pristine_tree

from .conftest import LIMITS, running, wait_for

BUGGY = "def add(a, b):\n    return a - b\n"
TEST = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n    assert add(0, 0) == 0\n"


@pytest.fixture(scope="module")
def graded_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    root = tmp_path_factory.mktemp("graded")

    def git(*arguments: str) -> None:
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
        subprocess.run(argv, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (root / "tests").mkdir()
    (root / "calc.py").write_text(BUGGY.replace("-", "+"))
    (root / "tests/test_add.py").write_text(TEST)
    git("add", "-A")
    git("commit", "-qm", "Initial")
    git("checkout", "-qb", "calc__1")
    (root / "calc.py").write_text(BUGGY)
    git("commit", "-qam", "Bug Patch")
    git("rm", "-q", "tests/test_add.py")
    git("commit", "-qm", "Remove F2P Tests")
    ids = ["tests/test_add.py::test_add"]
    return Task(
        instance_id="calc__1", repo="calc", repo_path=str(root), FAIL_TO_PASS=ids, test_cmd="python -m pytest -q"
    )


def play(backend: Backend, task: Task, command: str) -> TreeDiff:
    """One command as the agent; its changes."""
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS) as box:
        box.run(command, timeout_s=20)
        return box.diff()


def verdict(backend: Backend, task: Task, diff: TreeDiff) -> Verdict:
    return Grader(backend, recipe.Grading(timeout_s=60)).grade(task, diff)


def test_a_fix_is_rewarded(backend: Backend, graded_task: Task) -> None:
    """Else no refusal below would prove anything."""
    assert verdict(backend, graded_task, play(backend, graded_task, "sed -i s/-/+/ calc.py")).resolved


def test_a_daemon_does_not_reach_the_box_that_grades(backend: Backend, graded_task: Task) -> None:
    """It writes a fix into every tree it finds, ten times a second; it would live on if its box were let live."""
    daemon = (
        "trap '' HUP INT TERM; while :; do for d in /testbed /testbed.orig /tmp /proc/*/cwd /proc/*/root/testbed; do"
        " sed s/-/+/ $d/calc.py >$d/.n && mv $d/.n $d/calc.py; done; sleep 0.1; done"
    )
    box = backend.create(agent_tree(graded_task, show_tests=False), limits=LIMITS)
    try:
        before = box.diff()
        box.run(f"cat >/tmp/d <<'END'\n{daemon}\nEND\n(setsid bash /tmp/d >/dev/null 2>&1 &); sleep 0.5", timeout_s=20)
        said = verdict(backend, graded_task, before)  # the agent's box still lives: worse than any real rollout
        assert box.diff() != {}, "the daemon never worked"
    finally:
        box.destroy()
    assert not said.resolved
    assert (pristine_tree(graded_task) / "calc.py").read_text() == BUGGY
    assert (agent_tree(graded_task, show_tests=False) / "calc.py").read_text() == BUGGY


def test_results_left_lying_are_not_read(backend: Backend, graded_task: Task) -> None:
    """Forged logs and result files, wherever a careless grader might look for them."""
    forge = (
        "for f in report.xml junit.xml results.json test_output.txt .report.json reward.txt /tmp/report.json;"
        " do echo 'tests/test_add.py::test_add PASSED' >$f; done;"
        " mkdir -p .pytest_cache/v/cache __pycache__ build; echo '{}' >.pytest_cache/v/cache/lastfailed;"
        " printf '>>>>> Start Test Output\\nPASSED tests/test_add.py::test_add\\n>>>>> End Test Output\\n' >log"
    )
    assert not verdict(backend, graded_task, play(backend, graded_task, forge)).resolved


PASS_ALL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    report = result.get_result()
    report.outcome, report.longrepr = 'passed', None
"""
METADATA = "printf 'Metadata-Version: 2.1\\nName: cheat\\nVersion: 1\\n'"
ENTRY_POINT = "printf '[pytest11]\\ncheat = cheat\\n'"
PLUGINS = {
    "entry point of a package": f"d=c.dist-info; mkdir $d; {METADATA} >$d/METADATA; {ENTRY_POINT} >$d/entry_points.txt",
    "entry point of an egg": f"d=cheat.egg-info; mkdir $d; {METADATA} >$d/PKG-INFO; {ENTRY_POINT} >$d/entry_points.txt",
    "pytest.ini": "printf '[pytest]\\naddopts = -p cheat\\n' >pytest.ini",
    "pytest.toml": 'printf \'[pytest]\\naddopts = ["-p", "cheat"]\\n\' >pytest.toml; cp pytest.toml .pytest.toml',
    "hidden ini": "printf '[pytest]\\naddopts = -p cheat\\n' >.pytest.ini",
    "a library of pytest": "echo 'import os; os._exit(0)' >iniconfig.py; cp iniconfig.py packaging.py",
    "a module of the standard library": "echo 'import os; os._exit(0)' >doctest.py; cp doctest.py unittest.py",
    "conftest by a symlink": "ln -s cheat.py conftest.py; mkdir tests; ln -s ../cheat.py tests/conftest.py",
    "conftest by a hard link and a rename": "mkdir tests; ln cheat.py tests/c; mv tests/c tests/conftest.py",
    "conftest by python": 'python -c \'import shutil; shutil.copy("cheat.py", "conftest.py")\'',
}
NAIVE = f"mkdir -p tests; cat >tests/test_add.py <<'END'\n{TEST}\nEND\npython -m pytest -q tests/test_add.py"


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_that_passes_everything_is_never_loaded(backend: Backend, graded_task: Task, name: str) -> None:
    write = f"cat >cheat.py <<'END'\n{PASS_ALL}\nEND\n"
    diff = play(backend, graded_task, write + PLUGINS[name])
    with backend.create(agent_tree(graded_task, show_tests=False), limits=LIMITS) as naive:
        naive.write(diff)
        assert naive.run(NAIVE, timeout_s=60).exit_code == 0, "no attack: a careless grader is not fooled either"
    said = verdict(backend, graded_task, diff)
    assert not said.resolved
    assert not any(said.f2p.values())


def test_the_agents_own_end_decides_nothing(backend: Backend, graded_task: Task) -> None:
    """The harness is not in the box: killing all there, or the shell, or filling its disk, forges no submission."""
    mark = f"78.{time.monotonic_ns() % 10_000_000}"
    box = backend.create(agent_tree(graded_task, show_tests=False), limits=LIMITS)
    with box:
        box.run(f"(setsid sleep {mark} &)", timeout_s=20)
        assert wait_for(f"sleep\0{mark}\0", present=True)
        assert box.run("sed -i s/-/+/ calc.py; kill -9 -1; kill -9 $$", timeout_s=20).exit_code == 137
        assert not running(f"sleep\0{mark}\0")
        assert list(box.diff()) == ["calc.py"]  # what was done counts, and the box goes on
        assert box.run("echo on", timeout_s=20).output == b"on\n"


# -- known not to be stopped: docs/security.md says so


def test_not_stopped_an_object_that_equals_everything(backend: Backend, graded_task: Task) -> None:
    equal = "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return E()"
    diff = play(backend, graded_task, f"cat >calc.py <<'END'\n{equal}\nEND")
    assert verdict(backend, graded_task, diff).resolved


def test_not_stopped_a_fix_for_the_visible_cases_only(backend: Backend, graded_task: Task) -> None:
    special = "def add(a, b): return 5 if (a, b) == (2, 3) else a - b"
    diff = play(backend, graded_task, f"echo '{special}' >calc.py")
    assert verdict(backend, graded_task, diff).resolved
