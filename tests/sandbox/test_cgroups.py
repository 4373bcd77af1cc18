"""Limits of a whole box. v1 for real where this machine has it; v2 on a directory laid out as the kernel lays it out.

A fake directory shows which files are found, written and joined, and nothing about what the kernel then does; that
`tests/vm/run.sh` shows, which runs this file on a machine with v2.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swe_lightning.sandbox import Limits, cgroups
from swe_lightning.sandbox.local import LocalBackend


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    """Only local boxes: how they are kept, not what they promise."""
    return local_backend


LIMITS = Limits(cpu=1.5, memory_mb=100, disk_mb=20, pids=30)
MEMORY = 120 << 20
V2_FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "cgroup.procs")


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    (root / "cgroup.subtree_control").write_text("cpuset memory\n")
    return root


def line(where: Path, kind: str, options: str) -> str:
    return f"30 24 0:26 / {where} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n"


def test_a_v2_machine_is_recognised(v2: Path) -> None:
    found, v1 = cgroups.mounts("24 1 8:1 / / rw - ext4 /dev/sda rw\n" + line(v2, "cgroup2", "nsdelegate"))
    assert (found, v1) == (v2, {})


def test_a_hybrid_machine_uses_v1(v2: Path, tmp_path: Path) -> None:
    (v2 / "cgroup.controllers").write_text("hugetlb\n")
    text = line(v2, "cgroup2", "nsdelegate") + line(tmp_path / "m", "cgroup", "memory")
    text += line(tmp_path / "c", "cgroup", "cpu,cpuacct") + line(tmp_path / "p", "cgroup", "pids")
    assert cgroups.mounts(text) == (None, {"memory": tmp_path / "m", "cpu": tmp_path / "c", "pids": tmp_path / "p"})


def test_v2_controllers_are_handed_down_as_far_as_they_exist(v2: Path) -> None:
    parent = cgroups.delegate(v2)
    assert parent == v2 / cgroups.PARENT
    assert (v2 / "cgroup.subtree_control").read_text() == "+pids +cpu"  # memory was there already
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (v2 / "cgroup.controllers").write_text("memory pids\n")
    assert (cgroups.delegate(v2) / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_v2_group_gets_its_values_and_is_joined_through_procs(tmp_path: Path) -> None:
    for name in V2_FILES:
        (tmp_path / name).write_text("")
    for name, value in cgroups.settings(LIMITS).items():
        cgroups._set(tmp_path, name, value)
    written = {name: (tmp_path / name).read_text() for name in V2_FILES}
    assert written == {
        "memory.max": str(MEMORY), "memory.swap.max": "0", "memory.oom.group": "0", "pids.max": "34",
        "cpu.max": "150000 100000", "cgroup.procs": "",
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(V2_FILES), "no file of the other version is made"
    assert cgroups.join_file(tmp_path) == tmp_path / "cgroup.procs"
    (tmp_path / "tasks").write_text("")
    assert cgroups.join_file(tmp_path) == tmp_path / "tasks"


def test_v1_directories_are_made_once_and_useless_without_memory(tmp_path: Path) -> None:
    for name in ("memory", "both"):
        (tmp_path / name).mkdir()
    places = {"memory": tmp_path / "memory", "cpu": tmp_path / "both", "pids": tmp_path / "both"}
    assert cgroups.v1_parents(places) == (tmp_path / "memory" / cgroups.PARENT, tmp_path / "both" / cgroups.PARENT)
    del places["memory"]
    assert cgroups.v1_parents(places) == ()


def test_a_live_box_is_in_its_groups_with_its_limits(backend: LocalBackend, tree: Path) -> None:
    parents = cgroups._parents(os.geteuid())
    if not parents:
        pytest.skip("this user can make no cgroups here")
    with backend.create(tree, limits=LIMITS) as box:
        inside = box.run("cat /proc/self/cgroup", timeout_s=20).output.decode()
        found: dict[str, str] = {}
        for parent in parents:
            group = parent / box.name
            assert (group / "cgroup.procs").read_text().split(), group
            names = [n for n in cgroups.settings(LIMITS) if (group / n).exists()]
            found |= {name: (group / name).read_text().strip() for name in names}
    wanted = {name: str(value) for name, value in cgroups.settings(LIMITS).items()}
    found.pop("memory.swap.max", None)
    assert {name: value for name, value in found.items() if value != wanted[name]} == {}
    assert any(name.startswith("memory.") for name in found)
    assert box.name not in inside, "the box must not learn its name on the host"
    assert not any((parent / box.name).exists() for parent in parents)
