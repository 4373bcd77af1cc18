"""The environment of test runs: pytest, its needs, nothing else; built once."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swe_lightning.sandbox.pyenv import test_environment as build_environment


def test_it_holds_pytest_and_nothing_of_ours(swel_home: Path) -> None:
    env = build_environment()
    python = str(env / "bin/python")
    script = "import importlib.metadata as m; print(sorted({d.name.lower() for d in m.distributions()}))"
    names = eval(subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True).stdout)
    assert "pytest" in names
    assert set(names) <= {
        "pytest",
        "iniconfig",
        "packaging",
        "pluggy",
        "pygments",
        "exceptiongroup",
        "tomli",
        "colorama",
    }
    assert subprocess.run([python, "-m", "pytest", "--version"], capture_output=True, check=True).stdout
    assert (env / "bin/pytest").read_text().startswith("#!/opt/env/bin/python\n")


def test_it_is_built_once_and_readable_by_all(swel_home: Path) -> None:
    first = build_environment()
    stamp = first.stat().st_mtime_ns
    assert build_environment() == first
    assert first.stat().st_mtime_ns == stamp
    assert first.stat().st_mode & 0o777 == 0o755
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in first.rglob("*") if not p.is_symlink())
