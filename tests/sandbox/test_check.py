"""A machine that cannot run boxes is told so in one sentence, before anything else happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swe_lightning.errors import UserError
from swe_lightning.recipe import SandboxSection
from swe_lightning.sandbox import Backend, Sandbox, make_backend
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


def test_backends_of_later_versions_are_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="kubernetes is not part of this version"):
        make_backend(SandboxSection(backend="kubernetes"))


def test_the_room_is_light() -> None:
    script = "import sys, swe_lightning.sandbox, swe_lightning.sandbox.local; print([m for m in sys.modules if m in "
    script += "('torch', 'verl', 'transformers', 'minisweagent', 'litellm', 'pyseccomp')])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_boxes_keep_the_protocols(backend: Backend, box: Sandbox) -> None:
    assert isinstance(backend, Backend)
    assert isinstance(box, Sandbox)
