"""Packages whose version comes from git, in a tree that has none: they must import all the same.

Such a package needs one of three things at import: a generated version file, its own installed metadata, or the version
tool itself. The first two are written into the exported tree (never over a file that is there), the third is told by
environment. Nothing is read from history: the version is made up, and newer than any minimum that could be asked for.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

PRETEND_VERSION = "99.0.0"
PRETEND_ENV = {
    "SETUPTOOLS_SCM_PRETEND_VERSION": PRETEND_VERSION,  # hatch-vcs and flit-scm listen to it too
    "VCS_VERSIONING_PRETEND_VERSION": PRETEND_VERSION,
    "PBR_VERSION": PRETEND_VERSION,
    "PDM_BUILD_SCM_VERSION": PRETEND_VERSION,
    "POETRY_DYNAMIC_VERSIONING_BYPASS": PRETEND_VERSION,
    "UV_DYNAMIC_VERSIONING_BYPASS": PRETEND_VERSION,
}
VERSION_FILE = (
    f"__version__ = version = {PRETEND_VERSION!r}\n"
    f"__version_tuple__ = version_tuple = {tuple(map(int, PRETEND_VERSION.split('.')))}\n"
    "__commit_id__ = commit_id = None\n"
)


def generated_files(tree: Path) -> dict[str, str]:
    """Path relative to `tree` -> text, for each file that a build from git would have made and that is not there."""
    project = _toml(tree / "pyproject.toml")
    tools = _table(project, "tool")
    setup = _ini(tree / "setup.cfg")
    setup_py = _text(tree / "setup.py")
    scm = _table(tools, "setuptools_scm")
    hatch = _table(tools, "hatch")
    pdm = _table(tools, "pdm", "version")
    from_git = (
        "setuptools_scm" in tools
        or _table(hatch, "version").get("source") == "vcs"
        or pdm.get("source") == "scm"
        or "use_scm_version" in setup_py
        or "pbr" in setup_py
    )
    if not from_git:
        return {}
    wanted = [scm.get("version_file"), scm.get("write_to"), pdm.get("write_to")]
    wanted.append(_table(hatch, "build", "hooks", "vcs").get("version-file"))
    wanted += re.findall(r"[\"'](?:write_to|version_file)[\"']\s*:\s*[\"']([^\"']+)[\"']", setup_py)
    files = [path for path in wanted if isinstance(path, str) and _inside(path) and path.endswith(".py")]
    if any((tree / path).exists() for path in files):  # made from a release: what it says of itself stands
        return {}
    found = dict.fromkeys(files, VERSION_FILE)
    name = _table(project, "project").get("name") or setup.get("metadata", "name", fallback="") or _called(setup_py)
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        folder = "src/" if (tree / "src").is_dir() else ""
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {PRETEND_VERSION}\n"
        found[f"{folder}{re.sub(r'[-.]+', '_', name)}.egg-info/PKG-INFO"] = metadata
    return {path: text for path, text in found.items() if _absent(tree, path)}


def _inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


def _absent(tree: Path, path: str) -> bool:
    """No file there, and no link on the way (it could lead out of the tree)."""
    here = tree
    for part in PurePosixPath(path).parts:
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            return False
        here = here / part
    return not here.exists() and not here.is_symlink()


def _table(data: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _text(file: Path) -> str:
    try:
        return "" if file.is_symlink() else file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError:  # a task may be about that very file
        return {}


def _ini(file: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(_text(file))
    except configparser.Error:
        parser.clear()
    return parser


def _called(setup_py: str) -> str:
    found = re.search(r"\bname\s*=\s*[\"']([^\"']+)[\"']", setup_py)
    return found.group(1) if found else ""
