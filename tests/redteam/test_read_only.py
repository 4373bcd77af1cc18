"""Writing where nothing may be written: the system, the environment, another box.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import pytest

from swe_lightning.records import Task
from swe_lightning.sandbox import Backend
from swe_lightning.sandbox.trees import agent_tree

from .conftest import LIMITS, Say


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "/usr/bin/x",
        "/usr/bin/env",
        "/etc/passwd",
        "/etc/ld.so.preload",
        "/opt/env/bin/python",
        "/opt/env/lib/x",
        "/opt/x",
        "/run/x",
        "/run/box/server.pyc",
        "/var/x",
        "/dev/x",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/proc/1/oom_score_adj",
    ],
)
def test_the_system_is_read_only(sh: Say, path: str) -> None:
    assert "WROTE" not in sh(f"(echo x >>{path}) 2>/dev/null && echo WROTE")
    if sh(f"[ -e {path} ] && echo there"):
        assert "WROTE" not in sh(f"rm -f {path} 2>/dev/null; [ -e {path} ] || echo WROTE")
    assert "WROTE" not in sh(f"chmod 777 {path} 2>/dev/null && echo WROTE; mv {path} /tmp/ 2>/dev/null && echo WROTE")


def test_one_box_does_not_see_another(backend: Backend, sh: Say, task: Task) -> None:
    sh("echo theirs >/tmp/t; echo theirs >/dev/shm/s; echo theirs >theirs; (sleep 88.5 &)")
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS) as other:
        said = other.run("cat /tmp/t /dev/shm/s theirs; cat /proc/[0-9]*/cmdline", timeout_s=20).output
        assert b"theirs\n" not in said.replace(b"theirs: No", b"")
        assert b"sleep\x0088.5" not in said
