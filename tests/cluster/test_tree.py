"""The way of a tree into a pod, and what is left of pods: both without a cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swe_lightning.sandbox import kubernetes_tree
from swe_lightning.sandbox.boxside.pod import Keeper
from swe_lightning.sandbox.kubernetes_ended import ended_long_ago, its_owner_is_gone
from swe_lightning.sandbox.kubernetes_manifests import ENDED_TTL_S
from swe_lightning.sandbox.owners import owner_stamp


@pytest.mark.parametrize("size", [1, 100, 2 << 20])
def test_a_tree_is_laid_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The keeper's own code lays what is sent, in messages of any size."""
    monkeypatch.setattr(kubernetes_tree, "LAY_BYTES", size)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a/b/empty").mkdir(parents=True)
    target.mkdir()
    (source / "a/b/data").write_bytes(bytes(range(256)) * 3)
    (source / "a/none").write_bytes(b"")
    (source / "run").write_bytes(b"#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / os.fsdecode(b"\xff odd\n")).write_bytes(b"x")
    (source / "link").symlink_to("nowhere")
    (source / "a/dir").symlink_to("b")
    os.mkfifo(source / "pipe")
    os.utime(source / "run", ns=(10**18, 10**18))
    keeper = Keeper.__new__(Keeper)
    keeper.original = os.fsencode(target)
    for batch in kubernetes_tree.batches(source):
        assert keeper.on_lay(batch) == []
    (source / "pipe").unlink()

    def seen(root: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in root.rglob("*"):
            name = str(path.relative_to(root))
            if path.is_symlink():
                found[name] = path.readlink()
            else:
                found[name] = path.is_dir() or (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        return found

    assert seen(target) == seen(source)
    assert len(seen(target)) == 9


def test_only_what_certainly_ended_is_removed() -> None:
    def job(kind: str, ago_s: float, status: str = "True") -> dict[str, object]:
        when = (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat()
        return {"status": {"conditions": [{"type": kind, "status": status, "lastTransitionTime": when}]}}

    late, early = ENDED_TTL_S + 60, ENDED_TTL_S - 60
    assert [ended_long_ago(job(k, late)) for k in ("Complete", "Failed", "Suspended")] == [True, True, False]
    assert not ended_long_ago(job("Complete", early))
    assert not ended_long_ago(job("Complete", late, "False"))
    assert not ended_long_ago({"status": {}})
    host = socket.gethostname()
    assert not its_owner_is_gone(f"{host} {owner_stamp()}")
    assert its_owner_is_gone(f"{host} {dead_stamp()}")
    assert not its_owner_is_gone(f"elsewhere {dead_stamp()}")
    assert not its_owner_is_gone("")


def dead_stamp() -> str:
    """The stamp of a process that has ended."""
    source = "from swe_lightning.sandbox.owners import owner_stamp; print(owner_stamp())"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.strip()
