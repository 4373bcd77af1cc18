"""SWE-bench rows graded end to end in a real box: official command, official parser, our proof; and the order of steps.

Field cases: E7, E11, L1 (no history while grading), L3, L4, L6, L7, L9, L10, H1, H5, E1 in a box.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swe_lightning import recipe
from swe_lightning.errors import DataError, GradingError
from swe_lightning.grading import Grader
from swe_lightning.grading.commands import gold_changes
from swe_lightning.grading.eval_command import (
    COMMANDS,
    directives,
    eval_command,
    is_pytest,
    runner_files,
    split_script,
)  # fmt: skip
from swe_lightning.records import InfraReason, Task
from swe_lightning.sandbox import FileState, TreeDiff
from swe_lightning.sandbox.local import LocalBackend

from .conftest import BUG, CLEAN, git

CORE = "calc/core.py"
BUGGY, FIXED = BUG[CORE].encode(), CLEAN[CORE].encode()
TEST = "tests/test_add.py"
ADDED = "tests/test_new.py"
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
export CALC_SETUP=done
git config --global --add safe.directory /testbed
git status
git checkout abc tests/test_add.py
git apply -v - <<'EOF_1'
diff --git a/x b/x
: '>>>>> Start Test Output' inside the test patch
EOF_1
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout abc tests/test_add.py
"""
PYTEST = "python -m pytest -rA tests/test_add.py tests/test_new.py"
RUNNER = b"""import importlib.util, sys, unittest
sys.dont_write_bytecode = True
loader, suite = unittest.TestLoader(), unittest.TestSuite()
for name in sys.argv[1:]:
    suite.addTests(loader.loadTestsFromName(name))
sys.exit(not unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite).wasSuccessful())
"""


def make_row(place: Path, **columns: Any) -> Task:
    """A repository with a bug at its base commit, a fix and a test patch: one test rewritten, one file added."""
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    old = {TEST: "def test_old(): pass\n"}
    for path, text in {**CLEAN, **BUG, **old, "runtests.py": RUNNER.decode()}.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    git(place, "add", "-A")
    git(place, "commit", "-q", "-m", "base")
    commit = git(place, "rev-parse", "HEAD").strip()
    (place / CORE).write_text(CLEAN[CORE])
    patch = git(place, "diff")
    git(place, "checkout", "-q", ".")
    (place / TEST).write_text(
        "import os\n" + CLEAN[TEST] + "\n\ndef test_setup():\n    assert os.environ['CALC_SETUP']\n"
    )
    (place / ADDED).write_text(
        "import unittest\nfrom calc import add, mul\n\n\nclass New(unittest.TestCase):\n"
        "    def test_new(self):\n        self.assertEqual(add(1, 1), 2)\n\n"
        "    def test_mul(self):\n        self.assertEqual(mul(2, 2), 4)\n"
    )
    git(place, "add", "-A")
    values = {
        "instance_id": "calc__calc-1",
        "repo": "calc/calc",
        "base_commit": commit,
        "patch": patch,
        "test_patch": git(place, "diff", "--cached"),
        "FAIL_TO_PASS": [f"{TEST}::test_add", f"{ADDED}::New::test_new"],
        "PASS_TO_PASS": [f"{TEST}::test_setup", f"{ADDED}::New::test_mul"],
        "repo_path": str(place),
        "eval_script": SCRIPT.format(command=PYTEST),
        "log_parser": "parse_log_pytest",
    }
    git(place, "reset", "-q", "--hard")
    return Task.model_validate({**values, **columns})


DJANGO = {
    "FAIL_TO_PASS": ["test_new (tests.test_new.New.test_new)"],
    "PASS_TO_PASS": ["test_mul (tests.test_new.New.test_mul)"],
    "eval_script": SCRIPT.format(command="python runtests.py tests.test_new"),
    "log_parser": "parse_log_django",
}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_row(tmp_path_factory.mktemp("bench") / "calc")


@pytest.fixture(scope="module")
def django(row: Task) -> Task:
    return row.model_copy(update=DJANGO)


FIX: TreeDiff = {CORE: FileState(FIXED)}


def test_e11_model_patch_then_tests_then_command(grader: Grader, row: Task) -> None:
    verdict = grader.grade(row, gold_changes(row))
    assert verdict.resolved, verdict.why
    assert verdict.proof == "recorder"
    assert verdict.order == ["pristine tree", "model patch (1 files)", "tests restored (2 files)", "test command"]
    assert not grader.grade(row, {}).resolved


def test_e11_the_box_sees_the_steps_in_this_order(backend: LocalBackend, row: Task) -> None:
    steps: list[tuple[str, object]] = []

    class Watching:
        def create(self, *args: Any, **options: Any) -> Any:
            box = backend.create(*args, **options)
            write, run = box.write, box.run

            def noted_write(changes: TreeDiff) -> None:
                steps.append(("write", sorted(changes)))
                write(changes)

            def noted_run(command: str, **more: Any) -> Any:
                steps.append(("run", "pytest" in command))
                return run(command, **more)

            box.write, box.run = noted_write, noted_run  # type: ignore[method-assign]
            return box

    assert Grader(Watching(), recipe.Grading()).grade(row, FIX).resolved  # type: ignore[arg-type]
    assert steps[0] == ("write", [CORE])
    assert steps[1] == ("write", [TEST, ADDED])
    assert steps.index(("run", True)) == 3, "after the recorder's own files"


def test_l4_a_file_that_the_test_patch_adds_is_not_the_models(grader: Grader, row: Task, django: Task) -> None:
    easy = (
        b"import unittest\nclass New(unittest.TestCase):\n    def test_new(self): pass\n    def test_mul(self): pass\n"
    )
    for task in (row, django):
        verdict = grader.grade(task, {ADDED: FileState(easy)})
        assert not verdict.resolved
        assert verdict.tampering == {ADDED: "test added"}
    link: TreeDiff = {"easy.py": FileState(easy), ADDED: FileState(b"../easy.py", 0o777, True)}
    assert not grader.grade(row, link).resolved


def test_l6_weakened_tests_are_restored(grader: Grader, row: Task) -> None:
    diff: TreeDiff = {TEST: FileState(b"def test_add(): pass\ndef test_setup(): pass\n"), "tests/test_mul.py": None}
    verdict = grader.grade(row, diff)
    assert not verdict.resolved
    assert verdict.tampering == {TEST: "test changed", "tests/test_mul.py": "test deleted"}
    assert grader.grade(row, {**diff, **FIX}).resolved, "a real fix beside them still counts"


def test_l3_a_lone_conftest_resolves_nothing(grader: Grader, django: Task, row: Task) -> None:
    hook = b"def pytest_runtest_logreport(report):\n    report.outcome = 'passed'\n"
    files = {"conftest.py": FileState(hook), "sitecustomize.py": FileState(b"import os; os._exit(0)"),
             "x.pth": FileState(b"import os; os._exit(0)"), "pytest.ini": FileState(b"[pytest]\naddopts = -k mul\n"),
             "tox.ini": FileState(b"[pytest]\n"), "setup.cfg": FileState(b"[tool:pytest]\n")}  # fmt: skip
    for task in (row, django):
        verdict = grader.grade(task, dict(files))
        assert not verdict.resolved
        assert sorted(verdict.tampering) == verdict.dropped_paths == sorted(files)


def test_l9_junk_is_worth_nothing(grader: Grader, row: Task) -> None:
    for diff in ({"junk.txt": FileState(b"x")}, {CORE: FileState(b"# a comment\n" + BUGGY)}, {}):
        assert grader.grade(row, diff).reward == 0.0


def test_l10_deselecting_by_settings_is_filtered_and_always_equal_is_not(grader: Grader, row: Task) -> None:
    ini: TreeDiff = {"pytest.ini": FileState(b"[pytest]\naddopts = -k test_mul\n")}
    assert not grader.grade(row, ini).resolved
    equal = b"class Any(int):\n    def __eq__(self, other): return True\n\n\ndef add(a, b): return Any()\n\n\n"
    cheat: TreeDiff = {CORE: FileState(equal + FIXED.partition(b"\n\n\n")[2])}
    assert grader.grade(row, cheat).resolved, "special-casing code is for the audit, as docs say: no grader sees it"


def test_l1_l7_the_grading_box_of_a_row_holds_no_history(backend: LocalBackend, row: Task) -> None:
    from swe_lightning.sandbox.trees import agent_tree, pristine_tree

    assert agent_tree(row, show_tests=False) == agent_tree(row, show_tests=True) == pristine_tree(row)
    names = {p.name for p in pristine_tree(row).rglob("*")}
    assert ".git" not in names
    assert "test_new.py" not in names, "tests of the test patch are in no tree an agent gets"
    with pytest.raises(DataError, match="no commit"):
        pristine_tree(row.model_copy(update={"base_commit": "0" * 40}))
    with pytest.raises(DataError, match="no base_commit"):
        pristine_tree(row.model_copy(update={"base_commit": None}))


def test_e7_a_patch_that_creates_what_exists_fails_fast(grader: Grader, row: Task) -> None:
    patch = b"diff --git a/calc/core.py b/calc/core.py\nnew file mode 100644\n--- /dev/null\n+++ b/calc/core.py\n"
    verdict = grader.grade(row, patch + b"@@ -0,0 +1 @@\n+x\n")
    assert (verdict.resolved, verdict.apply) == (False, "failed")
    assert verdict.seconds < 20
    minus, plus = b"-    return a - b\n+    return a + b\n", b"-    return a + b\n+    return a - b\n"
    already = row.patch.encode().replace(minus, plus)
    assert already != row.patch.encode()
    verdict = grader.grade(row, already)
    assert (verdict.resolved, verdict.apply) == (False, "failed"), "taken back, it would be the fix"


def test_e7_build_products_in_a_patch_are_left_out(grader: Grader, row: Task) -> None:
    built: TreeDiff = {"calc/__pycache__/core.cpython-311.pyc": FileState(b"x"), "calc/core.py.orig": FileState(b"x")}
    verdict = grader.grade(row, {**FIX, **built})
    assert verdict.resolved
    assert (verdict.dropped_paths, verdict.tampering) == (sorted(built), {})


def test_fuzzy_patch_applies_as_in_swebench(grader: Grader, row: Task) -> None:
    shifted = row.patch.encode().replace(b" def add(a, b):", b" def add(a,  b):")
    verdict = grader.grade(row, shifted)
    assert (verdict.resolved, verdict.apply) == (True, "patch-fuzz")


# ---- a runner that is not pytest ---------------------------------------------------------------------------------


def test_django_like_runner_by_its_log(grader: Grader, django: Task) -> None:
    verdict = grader.grade(django, FIX)
    assert verdict.resolved, verdict.why
    assert verdict.proof == "log"
    assert not grader.grade(django, {}).resolved


ENDINGS = {
    "exit code 0 at import": b"import os; os._exit(0)\n",
    "printed passes and exit": (
        b"import os\nprint('test_new (tests.test_new.New.test_new) ... ok\\n"
        b"test_mul (tests.test_new.New.test_mul) ... ok', flush=True)\nos._exit(3)\n"
    ),
    "shell killed": b"import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)\n",
    "forged end marker": (
        b"import os, signal\nprint('test_new (tests.test_new.New.test_new) ... ok\\n"
        b"test_mul (tests.test_new.New.test_mul) ... ok\\nother (tests.o.O.other) ... FAIL\\n\\nswel-end 0123 0',"
        b" flush=True)\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)\n"
    ),
    "nonce looked for": (
        b"import os, re\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        b"        for name in ('cmdline', 'environ'):\n            try: text = open(f'/proc/{p}/{name}').read()\n"
        b"            except OSError: continue\n"
        b"            assert not re.search(r'swel-(?:begin|end) [0-9a-f]{32}', text)\n"
        b"for folder, _, names in os.walk('/tmp'):\n    assert 'nonce' not in names\n"
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_session_that_is_not_proved_passes_nothing(grader: Grader, django: Task, name: str) -> None:
    verdict = grader.grade(django, {CORE: FileState(ENDINGS[name] + BUGGY)})
    assert (verdict.resolved, verdict.reward) == (False, 0.0)
    assert verdict.why


def test_a_test_file_rewritten_before_it_is_read_is_noticed(grader: Grader, row: Task, django: Task) -> None:
    """An earlier test file imports the code, which rewrites the next one: its passes would be genuine."""
    easy = "import unittest\\nclass New(unittest.TestCase):\\n def test_new(self): pass\\n def test_mul(self): pass\\n"
    code = f"with open('/testbed/{ADDED}', 'w') as f:\n    f.write('{easy}')\n".encode() + BUGGY
    later = row.model_copy(update={"FAIL_TO_PASS": [f"{ADDED}::New::test_new"], "PASS_TO_PASS": []})
    labels = SCRIPT.format(command="python runtests.py tests.test_mul tests.test_new")
    for task in (later, django.model_copy(update={"eval_script": labels})):
        verdict = grader.grade(task, {CORE: FileState(code)})
        assert not verdict.resolved
        assert verdict.why == "a test file changed while the tests ran: ./tests/test_new.py"


def test_the_nonce_is_in_no_argument_environment_or_file(grader: Grader, django: Task) -> None:
    """The probe of ENDINGS on a fixed tree: it asserts, so finding the nonce would break the tests."""
    verdict = grader.grade(django, {CORE: FileState(ENDINGS["nonce looked for"] + FIXED)})
    assert verdict.resolved, verdict.why


def test_what_the_log_cannot_prove_is_said_to_be_weaker(grader: Grader, django: Task, row: Task) -> None:
    """Lines printed in the runner's own format count for such a runner; for pytest they do not. docs/grading.md."""
    lines = (*django.FAIL_TO_PASS, *django.PASS_TO_PASS)
    forged = "import atexit, os\n@atexit.register\ndef end():\n" + "".join(
        f"    print({f'{line} ... ok'!r}, flush=True)\n" for line in lines
    ) + "    os._exit(0)\n"  # fmt: skip
    assert grader.grade(django, {CORE: FileState(forged.encode() + BUGGY)}).proof == "log"
    said = [*(f"PASSED {i}" for i in (*row.FAIL_TO_PASS, *row.PASS_TO_PASS)), "FAILED tests/other.py::other"]
    printed = "import atexit\n@atexit.register\ndef end():\n" + "".join(
        f"    print({line!r}, flush=True)\n" for line in said
    )
    assert not grader.grade(row, {CORE: FileState(printed.encode() + BUGGY)}).resolved
    assert "**count**" in (Path(__file__).parents[2] / "docs" / "grading.md").read_text()


def test_e1_a_runner_without_names_is_a_parse_error_unless_the_patch_made_it_so(grader: Grader, row: Task) -> None:
    quiet = row.model_copy(update={"eval_script": SCRIPT.format(command="python -m pytest -q tests")})
    with pytest.raises(GradingError) as caught:
        grader.grade(quiet, FIX)
    assert caught.value.reason == InfraReason.PARSE_ERROR
    lists = {k: DJANGO[k] for k in ("FAIL_TO_PASS", "PASS_TO_PASS", "log_parser")}
    piped = SCRIPT.format(command="set -o pipefail; python runtests.py tests.test_new | cat")
    only = SCRIPT.format(command=f"python -m pytest -q {ADDED}::New::test_new")
    one = row.model_copy(update={"eval_script": only, "FAIL_TO_PASS": row.FAIL_TO_PASS[1:], "PASS_TO_PASS": []})
    with pytest.raises(GradingError) as caught:
        grader.grade(one, FIX)
    assert caught.value.reason == InfraReason.PARSE_ERROR, "without the patch all fail: that shows nothing"
    silent = row.model_copy(update={**lists, "eval_script": piped})
    says = b"print('41 passed in 0.1s', flush=True)\nimport os\nos._exit(0)\n"
    verdict = grader.grade(silent, {CORE: FileState(says + BUGGY)})
    assert not verdict.resolved, "its own words are no broken machine: without the patch the log can be read"


def test_h5_output_that_is_not_text_changes_nothing(grader: Grader, row: Task, django: Task) -> None:
    for task in (row, django):
        noisy = b"import os\nos.write(1, b'ok\\xff\\n')\n" + FIXED
        assert grader.grade(task, {CORE: FileState(noisy)}).resolved


def test_h1_a_noisy_shell_start_does_not_hide_the_session(grader: Grader, row: Task) -> None:
    """Something printed before everything else (a broken profile) is not taken for a marker."""
    noisy = row.model_copy(update={"test_env": {"BASH_ENV": "/testbed/noise.sh"}})
    verdict = grader.grade(noisy, {**FIX, "noise.sh": FileState(b"echo bash: /x: No such file >&2\n")})
    assert verdict.resolved, verdict.why


def test_a_test_patch_that_does_not_fit_is_the_rows_fault(grader: Grader, row: Task) -> None:
    broken = row.model_copy(update={"test_patch": (row.test_patch or "").replace("test_old", "test_other")})
    with pytest.raises(DataError, match="its test patch does not fit its tree"):
        grader.grade(broken, FIX)


# ---- scope, commands ---------------------------------------------------------------------------------------------


def test_scope_of_the_tests(backend: LocalBackend, task: Task) -> None:
    breaks = {CORE: FileState(FIXED.replace(b"a * b", b"a * b + 1"))}
    for scope, resolved in (("listed", False), ("fail_to_pass_files", True), ("all", False)):
        section = recipe.Grading.model_validate({"tests": scope})
        assert Grader(backend, section).grade(task, breaks).resolved == resolved, scope
        assert Grader(backend, section).grade(task, FIX).resolved, scope


def bench(repo: str, **columns: Any) -> Task:
    patch = "diff --git a/tests/a/test_x.py b/tests/a/test_x.py\ndiff --git a/tests/a/data.json b/tests/a/data.json\n"
    return Task.model_validate({"instance_id": "i", "repo": repo, "test_patch": patch, **columns})


def test_commands_of_rows_without_an_eval_script() -> None:
    assert eval_command(bench("pallets/flask")).command == "pytest -rA tests/a/test_x.py"
    assert directives(bench("django/django")) == ["a.test_x"]
    assert eval_command(bench("django/django", version="3.0")).command.endswith("--parallel 1 a.test_x")
    assert eval_command(bench("django/django", version="1.9")).command.endswith("--verbosity 2 a.test_x")
    with pytest.raises(DataError, match="depends on the version, and the row has none"):
        eval_command(bench("django/django"))
    with pytest.raises(DataError, match="no test command for some/other"):
        eval_command(bench("some/other"))
    recorded = {repo for repo in COMMANDS if eval_command(bench(repo, version="1")).pytest}
    assert set(COMMANDS) - recorded == {"django/django", "sympy/sympy", "sphinx-doc/sphinx", "pytest-dev/pytest"}


def test_eval_scripts_lose_their_git_and_keep_their_set_up() -> None:
    setup, command = split_script("i", SCRIPT.format(command="pytest -rA a.py"))
    assert setup == ["cd /testbed", "export CALC_SETUP=done"]
    assert command == "pytest -rA a.py"
    with pytest.raises(DataError, match="no pair of markers"):
        split_script("i", "pytest\n")


def test_the_runner_that_a_command_names_is_not_the_models_to_change(grader: Grader, django: Task) -> None:
    prints = "".join(f"print({i + ' ... ok'!r})\n" for i in (*django.FAIL_TO_PASS, *django.PASS_TO_PASS))
    verdict = grader.grade(django, {"runtests.py": FileState(prints.encode())})
    assert not verdict.resolved
    assert verdict.tampering == {"runtests.py": "test runner"}
    named = {
        "PYTHONWARNINGS='ignore::A,ignore::B' bin/test -C --verbose a/b.py": {"bin/test"},
        "./tests/runtests.py --verbosity 2 a.test_x": {"tests/runtests.py"},
        "cd x && bash -e run.sh | tee log.txt; A=1 python3 -u tools/t.py x.py": {"run.sh", "tools/t.py"},
        "python -m pytest -q a/b.py": set(),
        "grep -q two notes.txt && /opt/bin/run && ../up.sh": set(),
    }
    for command, files in named.items():
        assert runner_files(command) == files, command


def test_only_one_plain_pytest_command_takes_the_recorder() -> None:
    for command in (
        "pytest -rA a.py",
        "python -m pytest a",
        "A=1 B='x' py.test",
        "/opt/bin/python3.9 -X dev -m pytest",
    ):
        assert is_pytest(command) == (not command.startswith("/opt")), command
    for command in ("pytest a | tee log", "pytest a; true", "tox -- a", "pytest a\npytest b", "pytester", "bin/test"):
        assert not is_pytest(command), command


def test_verdicts_go_through_json(grader: Grader, row: Task) -> None:
    verdict = grader.grade(row, {**FIX, "conftest.py": FileState(b"")})
    again = json.loads(json.dumps(verdict.as_dict()))
    assert again["tampering"] == {"conftest.py": "test configuration"}


# ---- the same proof in containers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docker_grader(docker_backend: Any) -> Grader:
    return Grader(docker_backend, recipe.Grading(timeout_s=120))


def test_fixes_and_cheats_in_containers(docker_grader: Grader, task: Task, row: Task, django: Task) -> None:
    exits = {CORE: FileState(b"import os; os._exit(0)\n" + BUGGY)}
    for each, proof in ((task, "recorder"), (row, "recorder"), (django, "log")):
        fixed = docker_grader.grade(each, gold_changes(each))
        assert (fixed.resolved, fixed.proof) == (True, proof), fixed.why
        assert each is row or not docker_grader.grade(each, exits).resolved


@pytest.mark.parametrize("name", ["forged end marker", "nonce looked for"])
def test_a_session_that_is_not_proved_passes_nothing_in_containers(
    docker_grader: Grader, django: Task, name: str
) -> None:
    verdict = docker_grader.grade(django, {CORE: FileState(ENDINGS[name] + BUGGY)})
    assert (verdict.resolved, verdict.reward) == (False, 0.0)
    if name == "nonce looked for":
        assert docker_grader.grade(django, {CORE: FileState(ENDINGS[name] + FIXED)}).resolved


SETS_UP = SCRIPT.replace("CALC_SETUP=done", "CALC_SETUP=done; python setup.py develop || true")
PASS_ALL = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    result = yield\n    result.get_result().outcome = 'passed'\n    result.get_result().longrepr = None\n"
)
IN_SET_UP = {
    "recorder rewritten": (
        f"for f in glob.glob('/tmp/swel_*/plugin/*.py'):\n    open(f, 'a').write(chr(10) + {PASS_ALL!r})\n"
    ),
    "module beside the recorder": (
        "for f in glob.glob('/tmp/swel_*'):\n    os.makedirs(f + '/plugin', exist_ok=True)\n"
        "    with open(f + '/plugin/sitecustomize.py', 'w') as g:\n"
        "        g.write('import sys, types; m = types.ModuleType(\"cheat\"); '\n"
        f"                'exec(' + repr({PASS_ALL!r}) + ', vars(m));'\n"
        "                'sys.modules[\"cheat\"] = m; import os; os.environ[\"PYTEST_PLUGINS\"] = \"cheat\"')\n"
    ),
    "conftest added": f"open('conftest.py', 'w').write({PASS_ALL!r})\n",
    "settings added": (
        f"open('cheat.py', 'w').write({PASS_ALL!r})\n"
        "open('pytest.ini', 'w').write('[pytest]\\naddopts = -p cheat\\n')\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_SET_UP)
def test_a_set_up_that_runs_the_models_code_gains_nothing(row: Task, backend: LocalBackend, name: str) -> None:
    """`pip install -e .` of a published set-up runs the tree's setup.py before any test."""
    task = row.model_copy(update={"eval_script": SETS_UP.format(command=PYTEST)})
    grader = Grader(backend, recipe.Grading(timeout_s=60))
    verdict = grader.grade(task, {"setup.py": FileState(b"import glob, os\n" + IN_SET_UP[name].encode())})
    assert (verdict.resolved, any(verdict.f2p.values()), verdict.dropped_paths) == (False, False, [])


def test_a_set_up_that_runs_honest_code_does_no_harm(row: Task, backend: LocalBackend) -> None:
    task = row.model_copy(update={"eval_script": SETS_UP.format(command=PYTEST)})
    diff: TreeDiff = {"setup.py": FileState(b"open('calc/version.py', 'w').write('1')"), CORE: FileState(FIXED)}
    assert Grader(backend, recipe.Grading(timeout_s=60)).grade(task, diff).resolved
