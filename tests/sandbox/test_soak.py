"""Nothing of a hundred boxes is left: processes, mounts, cgroups, descriptors, files. The benchmark does thousands."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from swe_lightning.sandbox.local import LocalBackend, LocalSandbox


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    """Only local boxes: how they are kept, not what they promise."""
    return local_backend


BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks/sandbox.py"


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("swel_sandbox_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return module


def test_a_hundred_boxes_leave_nothing(backend: LocalBackend, tmp_path: Path, benchmark: ModuleType) -> None:
    tree = benchmark.make_tree(tmp_path / "tree", files=60)
    left = benchmark.soak(backend, tree, cycles=100, workers=4, say=lambda _: None)
    assert len(left) >= 6
    assert {name: count for name, count in left.items() if count > 0} == {}


def test_the_soak_sees_a_leak(
    backend: LocalBackend, tmp_path: Path, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it proves nothing: with a destroy that does nothing every trace grows."""
    tree = benchmark.make_tree(tmp_path / "tree", files=30)
    kept: list[LocalSandbox] = []
    destroy = LocalSandbox.destroy
    monkeypatch.setattr(LocalSandbox, "destroy", lambda box: kept.append(box))
    monkeypatch.setattr(benchmark, "PATIENCE_S", 0.2)
    left = benchmark.soak(backend, tree, cycles=4, workers=1, say=lambda _: None)
    monkeypatch.undo()
    for box in kept:
        destroy(box)
    assert left["processes"] >= 4, left
    assert left["descriptors"] >= 12
    assert left["records"] == 4


def test_the_table_names_what_missed_its_target(benchmark: ModuleType) -> None:
    assert benchmark.cell(59.94, 60.0) == "59.9 ms (target 60)"
    assert benchmark.cell(61.0, 60.0) == "61.0 ms (target 60, missed)"
    assert benchmark.cell(None, None) == "-"
