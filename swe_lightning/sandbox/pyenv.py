"""The Python environment tests run in: pytest and what pytest needs, nothing else.

Built once per interpreter and pytest version under `home()/envs` from the packages this process itself runs with, so
it needs no network and cannot drift. It is mounted read-only at /opt/env in local boxes; scripts carry that path.
"""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import hashlib
import importlib.metadata as metadata
import os
import re
import shutil
import sys
import tempfile
import venv
from pathlib import Path

from swe_lightning import paths
from swe_lightning.errors import MissingPart
from swe_lightning.sandbox.rootfs import ENV_IN_BOX, base_python

WANTED = "pytest"
LAYOUT = 2  # raise when the way an environment is built changes


def test_environment() -> Path:
    """The environment's directory; its `bin/python` also works outside a box."""
    distributions = _closure(WANTED)
    executable = base_python()[1]
    versions = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions)
    key = hashlib.sha256("\n".join([str(LAYOUT), str(executable), sys.version, *versions]).encode()).hexdigest()[:16]
    place = paths.home() / "envs"
    place.mkdir(exist_ok=True)
    target = place / key
    if (target / "pyvenv.cfg").exists():
        return target
    with (place / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "pyvenv.cfg").exists():
            temporary = Path(tempfile.mkdtemp(dir=place, prefix=f".{key}."))
            try:
                _build(temporary, distributions)
                temporary.chmod(0o755)
                os.rename(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return target


test_environment.__test__ = False  # type: ignore[attr-defined]  # pytest must not take it for a test


def _closure(name: str) -> list[metadata.Distribution]:
    """`name` and everything it requires here, as installed in this process."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        wanted = waiting.pop()
        if wanted.lower() in found:
            continue
        try:
            distribution = metadata.distribution(wanted)
        except metadata.PackageNotFoundError:
            raise MissingPart(f"tests are run with pytest, but {wanted} is not installed: pip install pytest") from None
        found[wanted.lower()] = distribution
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return list(found.values())


def _build(directory: Path, distributions: list[metadata.Distribution]) -> None:
    builder = venv.EnvBuilder(symlinks=True, with_pip=False)
    builder.create(directory)
    for link in ("python", "python3"):
        with contextlib.suppress(FileNotFoundError):
            (directory / "bin" / link).unlink()
        (directory / "bin" / link).symlink_to(base_python()[1])
    site = next((directory / "lib").glob("python3*")) / "site-packages"
    for distribution in distributions:
        _copy(distribution, site)
    for script in ("pytest", "py.test"):
        text = f"#!{ENV_IN_BOX}/bin/python\nimport sys\n\nimport pytest\n\nsys.exit(pytest.main())\n"
        (directory / "bin" / script).write_text(text)
        (directory / "bin" / script).chmod(0o755)
    # Hundreds of lexers that no test run imports would take most of the build; those pytest imports must be compiled,
    # or every test run compiles them again.
    unused = re.compile(
        r"/pygments/(lexers/(?!(__init__|_mapping|python|diff)\.py)|styles/(?!(__init__|_mapping)\.py))"
    )
    compileall.compile_dir(site, quiet=2, workers=1, rx=unused)
    for path in [directory, *directory.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _copy(distribution: metadata.Distribution, site: Path) -> None:
    """Files that lie in site-packages; scripts are written anew."""
    for file in distribution.files or []:
        if file.parts[0] == ".." or file.suffix == ".pyc" or "__pycache__" in file.parts:
            continue
        source = Path(str(distribution.locate_file(file)))
        if source.is_file():
            target = site / Path(*file.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copystat(source, target)
