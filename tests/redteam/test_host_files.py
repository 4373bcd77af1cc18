"""Files of the host read through the box, or through what looks at the box from outside.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swe_lightning.records import Task
from swe_lightning.sandbox import FileState, Sandbox
from swe_lightning.sandbox.trees import pristine_tree

from .conftest import Say


def test_files_of_the_host_are_not_there(sh: Say, tmp_path: Path, swel_home: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    (Path("/tmp") / f"swel-red-{os.getpid()}").write_text("host secret")
    try:
        for path in (secret, Path(f"/tmp/swel-red-{os.getpid()}"), swel_home, Path(__file__)):
            assert "No such file" in sh(f"cat {path}"), path
    finally:
        Path(f"/tmp/swel-red-{os.getpid()}").unlink()
    assert sh("ls -d /etc/shadow /etc/ssh /etc/hostname /home /mnt /srv /sys /boot /var/lib /var/log 2>/dev/null") == ""
    assert sh("find /run /var /root -type s 2>/dev/null") == ""


def test_links_lead_nowhere_and_diff_does_not_follow_them(sh: Say, box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    tmp_path.chmod(0o755)
    sh(f"ln -s {secret} a; ln -s {tmp_path} d; ln -s /etc e; rm m.py; ln -s {secret} m.py")
    sh("mkdir x; ln -s ../../../.. x/up")
    assert "host secret" not in sh("cat a d/secret m.py")
    found = box.diff()
    assert {name for name in found} == {"a", "d", "e", "m.py", "x/up"}
    assert all(state is not None and state.symlink for state in found.values())
    assert found["m.py"] == FileState(os.fsencode(secret), 0o777, symlink=True)


def test_a_directory_swapped_for_a_link_during_diff_leaks_nothing(sh: Say, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("host secret")
    tmp_path.chmod(0o755)
    sh(f"mkdir d; echo mine >d/f; (while :; do mv d k; ln -s {tmp_path} d; rm d; mv k d; done >/dev/null 2>&1 &)")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for state in box.diff().values():
            assert state is None or b"host secret" not in state.data


def test_pipes_devices_and_sockets_do_not_hang_or_leak(sh: Say, py: Say, box: Sandbox) -> None:
    sh("mkfifo pipe; mknod null c 1 3; mknod disk b 8 0; rm m.py; mkfifo m.py")
    py("import socket; s = socket.socket(socket.AF_UNIX); s.bind('sock')")
    started = time.monotonic()
    assert box.diff() == {"m.py": None}
    assert time.monotonic() - started < 5
    assert {note.split(":")[0] for note in box.left_out} == {"pipe", "sock", "m.py"}


def test_odd_names_stay_names(sh: Say, box: Sandbox) -> None:
    sh("printf 1 >$'a\\nb'; printf 2 >$'\\xff\\xfe'; printf 3 >'$(touch pwned)'; printf 4 >'..x'")
    sh("mkdir $'\\n'; printf 5 >$'\\n/\\n'")
    found = {os.fsencode(name): state.data for name, state in box.diff().items() if state}
    assert found == {b"a\nb": b"1", b"\xff\xfe": b"2", b"$(touch pwned)": b"3", b"..x": b"4", b"\n/\n": b"5"}


def test_whiteouts_and_overlay_marks_cannot_be_forged(sh: Say, py: Say, box: Sandbox) -> None:
    said = py(
        "import os\nos.mkdir('d')\n"
        "for kind in ('trusted', 'user'):\n"
        "    for name, value in (('opaque', b'y'), ('redirect', b'/')):\n"
        "        try: os.setxattr('d', f'{kind}.overlay.{name}', value); print(kind)\n"
        "        except OSError: pass\n"
        "try: os.mknod('w', 0o20000, 0); print('whiteout')\n"
        "except OSError: pass"
    )
    assert "trusted" not in said
    assert "whiteout" not in said
    assert box.diff() == {}
    assert sh("ls d m.py") == "m.py\n\nd:\n"


def test_hard_links_do_not_reach_out_of_the_box(sh: Say, py: Say, box: Sandbox, task: Task) -> None:
    """Not to the original tree, not to the system, and not across a rename into the tree."""
    original = (pristine_tree(task) / "m.py").read_bytes()
    for target in ("/testbed.orig/m.py", "/etc/passwd", "/usr/bin/env", "/opt/env/bin/pytest", "/proc/1/environ"):
        assert "LINKED" not in sh(f"ln {target} here 2>/dev/null && echo LINKED; ln -P {target} here && echo LINKED")
    said = py(
        "import os\n"
        "fd = os.open('/testbed.orig/m.py', os.O_PATH)\n"
        "for source in (f'/proc/self/fd/{fd}', f'/dev/fd/{fd}'):\n"
        "    try: os.link(source, 'mine', follow_symlinks=True); print('LINKED')\n"
        "    except OSError: pass\n"
        "    try: os.truncate(source, 0); print('TRUNCATED')\n"
        "    except OSError: pass"
    )
    assert said == ""
    sh("ln m.py twin; echo changed >>twin; mv twin m2.py")
    assert {name for name in box.diff()} == {"m.py", "m2.py"}
    assert (pristine_tree(task) / "m.py").read_bytes() == original
