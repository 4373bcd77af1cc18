"""Statuses come from the recorder, cost little, and leave nothing in the tree."""

from __future__ import annotations

from pathlib import Path

from swe_lightning.grading import run_tests
from swe_lightning.sandbox.local import LocalBackend

MIXED = """
import unittest
import pytest

def test_ok(): pass
def test_bad(): assert 0
@pytest.mark.parametrize("x", ["a b", "c/d::e"])
def test_p(x): pass

class Case(unittest.TestCase):
    def test_unit(self): pass
    def test_sub(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(i, 0)
"""


def package(place: Path, **files: str) -> Path:
    for name, text in files.items():
        (place / name.replace("__", "/")).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (place / name.replace("__", "/")).with_suffix(".py").write_text(text)
    return place


def test_all_statuses_of_a_directory(backend: LocalBackend, tmp_path: Path) -> None:
    tree = package(tmp_path, tests__test_a=MIXED, tests__test_broken="import nothing\n")
    with backend.create(tree) as box:
        run = run_tests(box, "python -m pytest -q tests", [], env={}, timeout_s=60)
        assert run.finished, run.log
        assert box.diff() == {}
        assert run.statuses == {
            "tests/test_a.py::test_ok": "PASSED",
            "tests/test_a.py::test_bad": "FAILED",
            "tests/test_a.py::test_p[a b]": "PASSED",
            "tests/test_a.py::test_p[c/d::e]": "PASSED",
            "tests/test_a.py::Case::test_unit": "PASSED",
            "tests/test_a.py::Case::test_sub": "FAILED",
            "tests/test_broken.py": "ERROR",
        }
        # The same box serves again, for some ids only; a broken file takes only its own tests with it.
        asked = ["tests/test_a.py::test_p[a b]", "tests/test_broken.py::test_z", "tests/test_a.py::nobody"]
        run = run_tests(box, "python -m pytest -q", asked, env={}, timeout_s=60)
        assert run.finished, run.log
        assert run.statuses == {asked[0]: "PASSED", asked[1]: "ERROR"}
        assert run.exit_code == 1


def test_long_lists_of_ids(backend: LocalBackend, tmp_path: Path) -> None:
    count, files = 2000, 40
    many = "import pytest\n@pytest.mark.parametrize('x', range(50))\ndef test_" + "long" * 40 + "(x): pass\n"
    tree = package(tmp_path, **{f"tests__{'deep' * 20}__test_{i}": many for i in range(files)})
    ids = [f"tests/{'deep' * 20}/test_{i}.py::test_{'long' * 40}[{x}]" for i in range(files) for x in range(50)]
    assert sum(map(len, ids)) > 500_000
    with backend.create(tree) as box:
        run = run_tests(box, "python -m pytest -q", ids[: count - 1], env={}, timeout_s=120)
    assert run.finished, run.log[-2000:]
    assert len(run.statuses) == count - 1
    assert set(run.statuses.values()) == {"PASSED"}


def test_environment_and_settings_of_the_package(backend: LocalBackend, tmp_path: Path) -> None:
    text = "import os, lib\ndef test_env(): assert os.environ['PYTHONPATH'] == 'src' and os.environ['K'] == 'v w'\n"
    text += "def test_first(): assert 0\ndef test_second(): pass\n"
    tree = package(tmp_path, src__lib="", unit__test_e=text)
    (tree / "pytest.ini").write_text("[pytest]\naddopts = -x --strict-markers\n")
    ids = [f"unit/test_e.py::test_{n}" for n in ("env", "first", "second")]
    with backend.create(tree) as box:
        run = run_tests(box, "python -m pytest", ids, env={"PYTHONPATH": "src", "K": "v w"}, timeout_s=60)
    assert run.finished, run.log
    assert list(run.statuses.values()) == ["PASSED", "FAILED", "PASSED"], "-x must not hide later tests"


def test_output_that_is_cut_or_not_text_changes_no_status(backend: LocalBackend, tmp_path: Path) -> None:
    noisy = "import os\ndef test_noise():\n    for _ in range(40):\n        os.write(1, b'\\xff' * 65536)\n"
    tree = package(tmp_path, test_n=noisy)
    with backend.create(tree) as box:
        run = run_tests(box, "python -m pytest -q -s", ["test_n.py::test_noise"], env={}, timeout_s=60)
    assert run.finished
    assert run.statuses == {"test_n.py::test_noise": "PASSED"}
    assert b"\xff" in run.log


def test_time_out(backend: LocalBackend, tmp_path: Path) -> None:
    tree = package(tmp_path, test_h="import time\ndef test_hang(): time.sleep(60)\n")
    with backend.create(tree) as box:
        run = run_tests(box, "python -m pytest -q", ["test_h.py::test_hang"], env={}, timeout_s=1)
    assert (run.finished, run.timed_out, run.statuses) == (False, True, {})
    assert run.seconds < 20
