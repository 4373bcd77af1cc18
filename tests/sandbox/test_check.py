"""A machine that cannot run boxes is told so in one sentence, before anything else happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from swe_lightning.sandbox import Backend, Sandbox
from swe_lightning.sandbox.check import escape_report
from swe_lightning.sandbox.local import LocalBackend

FORBID = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'


def test_this_machines_report_is_clean(able: None) -> None:
    backend = LocalBackend()
    rows = escape_report(backend)
    backend.close()
    assert [row for row in rows if not row[1]] == []
    assert len(rows) >= 15


def test_forbidden_namespaces_are_one_clear_sentence(able: None, swel_home: Path) -> None:
    script = "from swe_lightning.sandbox.check import check_host; print(repr(check_host()))"
    argv = ["unshare", "-Ur", "sh", "-c", FORBID, "sh", sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("MissingPart('local sandboxes need user namespaces, which this machine forbids"), done
    assert "sysctl user.max_user_namespaces" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_room_is_light() -> None:
    script = "import sys, swe_lightning.sandbox.local, swe_lightning.sandbox.docker, swe_lightning.sandbox.kubernetes\n"
    script += "print([m for m in sys.modules if m in "
    script += "('torch', 'verl', 'transformers', 'minisweagent', 'litellm', 'pyseccomp', 'docker', 'kubernetes')])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_boxes_keep_the_protocols(backend: Backend, box: Sandbox) -> None:
    assert isinstance(backend, Backend)
    assert isinstance(box, Sandbox)
