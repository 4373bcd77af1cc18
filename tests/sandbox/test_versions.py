"""Packages that take their version from git import, and their tests run, in a box that has no git."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox import Limits
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.trees import pristine_tree
from swe_lightning.sandbox.versions import PRETEND_VERSION, VERSION_FILE, generated_files

SETUPTOOLS_SCM = """
[build-system]
requires = ["setuptools", "setuptools-scm"]
build-backend = "setuptools.build_meta"
[project]
name = "my-pkg"
dynamic = ["version"]
[tool.setuptools_scm]
version_file = "src/my_pkg/_version.py"
"""
HATCH = """
[project]
name = "my-pkg"
dynamic = ["version"]
[tool.hatch.version]
source = "vcs"
[tool.hatch.build.hooks.vcs]
version-file = "my_pkg/_version.py"
"""
PDM = '[project]\nname = "my-pkg"\n[tool.pdm.version]\nsource = "scm"\nwrite_to = "my_pkg/_version.py"\n'
SETUP_PY = "from setuptools import setup\nsetup(name='my-pkg', use_scm_version={'write_to': 'my_pkg/_version.py'})\n"
PBR = "import setuptools\nsetuptools.setup(setup_requires=['pbr'], pbr=True)\n"
FROM_FILE = "from my_pkg._version import __version__, version_tuple\n"
FROM_METADATA = "from importlib.metadata import version\n__version__ = version('my-pkg')\n"
FROM_TOOL = "import setuptools_scm\n__version__ = setuptools_scm.get_version(root='/testbed')\n"
NO_SCM = "setuptools-scm is not installed: the dev extra brings it"

STYLES: dict[str, dict[str, str]] = {
    "setuptools-scm, file": {"pyproject.toml": SETUPTOOLS_SCM, "src/my_pkg/__init__.py": FROM_FILE},
    "setuptools-scm, metadata": {"pyproject.toml": SETUPTOOLS_SCM, "src/my_pkg/__init__.py": FROM_METADATA},
    "setuptools-scm, asked at import": {"pyproject.toml": SETUPTOOLS_SCM, "src/my_pkg/__init__.py": FROM_TOOL},
    "hatch-vcs": {"pyproject.toml": HATCH, "my_pkg/__init__.py": FROM_FILE},
    "pdm": {"pyproject.toml": PDM, "my_pkg/__init__.py": FROM_FILE},
    "setup.py": {"setup.py": SETUP_PY, "my_pkg/__init__.py": FROM_FILE},
    "pbr": {"setup.py": PBR, "setup.cfg": "[metadata]\nname = my-pkg\n", "my_pkg/__init__.py": FROM_METADATA},
}


@pytest.fixture(scope="module")
def plain(able: None) -> Iterator[LocalBackend]:
    backend = LocalBackend()
    yield backend
    backend.close()


def tool() -> dict[str, bytes]:
    """setuptools_scm and what it needs, as files beside the package (no box has them)."""
    pytest.importorskip("setuptools_scm", reason=NO_SCM)
    found = {}
    for name in ("setuptools-scm", "setuptools"):
        for file in distribution(name).files or []:
            if file.suffix in (".py", ".txt") and file.parts[0] in ("setuptools_scm", "setuptools", "_distutils_hack"):
                found[f".deps/{file}"] = Path(str(file.locate())).read_bytes()
    return found


@pytest.mark.parametrize("style", STYLES)
def test_it_imports_without_git(plain: LocalBackend, tmp_path: Path, style: str) -> None:
    root = tmp_path / "repository"
    test = "import my_pkg\n\ndef test():\n    assert my_pkg.__version__[0].isdigit()\n"
    for name, text in {**STYLES[style], "tests/test_it.py": test}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for arguments in (
        ["init", "-q", "-b", "pkg__1"], ["add", "-A"], ["commit", "-qm", "Bug Patch"],
        ["commit", "-qm", "Remove F2P Tests", "--allow-empty"],
    ):  # fmt: skip
        argv = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(root), *arguments]
        subprocess.run(argv, check=True, capture_output=True)
    tree = pristine_tree(Task(instance_id="pkg__1", repo="pkg", repo_path=str(root)))
    files = tool() if "asked" in style else {}
    with plain.create(tree, limits=Limits(memory_mb=512, disk_mb=64), files=files) as box:
        command = "PYTHONPATH=src:.deps python -m pytest -q -p no:cacheprovider tests"
        result = box.run(command, timeout_s=60)
        assert b"1 passed" in result.output, result.output.decode()
        shown = box.run("PYTHONPATH=src:.:.deps python -c 'import my_pkg; print(my_pkg.__version__)'", timeout_s=30)
        assert shown.output.decode().splitlines()[-1] == PRETEND_VERSION
        assert box.diff() == {}, "what was generated is part of the base, never of the agent's patch"


def test_nothing_is_generated_for_a_version_that_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    (tmp_path / "setup.py").write_text("from setuptools import setup\nsetup(name='x', version='1')\n")
    assert generated_files(tmp_path) == {}


def test_files_that_exist_and_paths_that_leave_the_tree_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src/my_pkg").symlink_to(tmp_path / "out")
    (tree / "src/my_pkg.egg-info").mkdir()
    (tree / "src/my_pkg.egg-info/PKG-INFO").write_text("mine")
    (tree / "pyproject.toml").write_text(SETUPTOOLS_SCM)
    assert generated_files(tree) == {}
    (tree / "src/my_pkg").unlink()
    (tree / "src/my_pkg").mkdir()
    (tree / "src/my_pkg/_version.py").write_text("version = '1.2'")
    (tree / "src/my_pkg.egg-info/PKG-INFO").unlink()
    assert generated_files(tree) == {}
    for path in ("../_version.py", "/tmp/_version.py", "version.txt", "a/../../b.py"):
        (tree / "pyproject.toml").write_text(f'[tool.setuptools_scm]\nversion_file = "{path}"\n')
        assert generated_files(tree) == {}
    (tree / "pyproject.toml").write_text("[tool.setuptools_scm\nbroken")
    assert generated_files(tree) == {}


def test_the_version_file_is_the_real_tools(tmp_path: Path) -> None:
    """Every name that setuptools-scm's own file defines is in ours."""
    scm = pytest.importorskip("setuptools_scm", reason=NO_SCM)
    real = tmp_path / "_version.py"
    scm.dump_version(root=str(tmp_path), version=PRETEND_VERSION, write_to=str(real))
    names: list[set[str]] = []
    for source in (real.read_text(), VERSION_FILE):
        space: dict[str, object] = {}
        exec(source, space)
        names.append({n for n in space if "version" in n and n != "TYPE_CHECKING"})
    assert names[0] <= names[1]
