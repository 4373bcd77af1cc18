"""When the suite runs as root, the same tests once more as an ordinary user: most users are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
USER = 23_456


def ordinary_python() -> tuple[str, dict[str, str]]:
    """An interpreter of this version that `USER` can run, with this process's packages."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin")):
        packages = [p for p in sys.path if p.endswith("site-packages")]
        env = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *packages]), "PATH": "/usr/bin:/bin", "HOME": "/"}
        argv = [
            candidate or "",
            "-c",
            f"import sys, pytest, pydantic; assert sys.version_info[:2] == ({version.replace('.', ',')})",
        ]
        try:
            done = subprocess.run(argv, user=USER, group=USER, extra_groups=[], env=env, capture_output=True, cwd="/")
        except OSError:
            continue
        if candidate and done.returncode == 0:
            return candidate, env
    pytest.skip(f"no Python {version} that an ordinary user can run with this environment's packages")


@pytest.mark.slow
@pytest.mark.parametrize("room", ["sandbox", "redteam"])
def test_the_same_tests_pass_as_an_ordinary_user(
    able: None, tmp_path_factory: pytest.TempPathFactory, room: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user")
    python, env = ordinary_python()
    home = Path(subprocess.run(["mktemp", "-d", "-p", "/tmp"], capture_output=True, text=True).stdout.strip())
    try:
        os.chown(home, USER, USER)
        argv = [
            python,
            "-m",
            "pytest",
            str(TESTS / room),
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            f"{home}/t",
        ]
        argv += ["--rootdir", str(TESTS.parent), "-c", str(TESTS.parent / "pyproject.toml")]
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home), "TMPDIR": str(home)}
        done = subprocess.run(
            argv, user=USER, group=USER, extra_groups=[], env=env, capture_output=True, text=True, cwd=home, timeout=280
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
