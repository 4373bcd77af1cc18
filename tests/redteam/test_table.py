"""docs/security.md and the attacks stay in step: every test is in its table, every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .conftest import LOCAL_ONLY, NOT_IN_PODS, why_not

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs/security.md"


def attacks_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_the_page_lists_exactly_the_attacks() -> None:
    existing = set().union(*(attacks_of(f) for f in HERE.glob("test_*.py") if f.name != Path(__file__).name))
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\|.*\| `(test_\w+)` \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted(existing)
    assert len(listed) == len(set(listed))


def test_what_is_not_stopped_is_said() -> None:
    """A test that shows an attack winning must be marked so in the table, and no other may be."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "`test_" in line and line.startswith("|")]
    assert {"**nothing**" in row for row in rows if "`test_not_stopped" in row} == {True}
    assert {"**nothing**" in row for row in rows if "`test_not_stopped" not in row} == {False}


def test_every_file_the_page_names_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE.read_text(encoding="utf-8")))
    assert named
    assert [name for name in named if not (HERE.parent.parent / name).exists()] == []


@pytest.mark.parametrize("backend", ["local", "docker", "kubernetes"])
def test_what_a_backend_leaves_out_has_a_reason(backend: str) -> None:
    """Exactly the attacks that are named; never a local one."""
    skipped = {}
    for file in HERE.glob("test_*.py"):
        for name in attacks_of(file):
            for parameters in (backend, f"{backend}-x"):
                if reason := why_not(f"{name}[{parameters}]"):
                    skipped[name] = reason
    pods = {**LOCAL_ONLY, **NOT_IN_PODS}
    assert skipped == {"local": {}, "docker": LOCAL_ONLY, "kubernetes": pods}[backend]
