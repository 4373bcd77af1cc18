"""Taking all of something: processes, memory, disk, names, output. The host and the other boxes notice nothing.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from swe_lightning.sandbox import FileState, Sandbox

from .conftest import LIMITS, Say


def test_a_fork_bomb_stays_in_its_box(box: Sandbox, sh: Say) -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    result = box.run(":() { :|:& }; :; sleep 3", timeout_s=1.5)
    assert result.timed_out
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 200
    assert sh("echo alive; ls -d /proc/[0-9]* | wc -l").startswith("alive\n")


def test_a_memory_bomb_takes_itself_only(box: Sandbox, sh: Say) -> None:
    one = box.run("python -c 'x = bytearray(1 << 30); print(\"GOT IT\")'", timeout_s=60)
    assert b"GOT IT" not in one.output
    source = (
        "import os, time\n"
        "for _ in range(12):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(os.urandom(1 << 20)) * 100\n"
        "        time.sleep(2)\n"
        "        os._exit(0)\n"
        "done = [os.wait()[1] for _ in range(12)]\n"
        "print('ALL FINE' if not any(done) else 'killed')"
    )
    many = box.run(f"python - <<'END'\n{source}\nEND", timeout_s=60)
    assert b"ALL FINE" not in many.output
    assert sh("echo alive") == "alive\n"


@pytest.mark.parametrize("place", ["/tmp", "/testbed", "/dev/shm", "/var/tmp"])
def test_filling_the_disk_ends_at_the_limit(sh: Say, place: str) -> None:
    said = sh(
        f"for i in 1 2 3 4 5 6 7 8; do head -c 8M /dev/zero >{place}/f$i; done 2>/dev/null; cat {place}/f* | wc -c"
    )
    assert 0 < int(said) <= LIMITS.disk_mb << 20
    assert "No space" in sh("echo more >/tmp/more; head -c 1M /dev/zero >/tmp/more")
    assert sh(f"rm {place}/f*; echo ok >m.py; cat m.py") == "ok\n"


def test_a_single_huge_sparse_file_is_refused(py: Say, box: Sandbox) -> None:
    assert "File too large" in py("open('sparse', 'w').truncate(1 << 40)")
    assert box.diff().get("sparse") in (None, FileState(b""))


def test_more_names_than_the_limit_are_refused(py: Say) -> None:
    said = py("import os\nfor i in range(300000): os.symlink('x', f'/tmp/{i}')", timeout_s=120)
    assert "No space left" in said


def test_endless_output_costs_bounded_memory(box: Sandbox) -> None:
    result = box.run("cat /dev/zero", timeout_s=1)
    assert result.timed_out
    assert result.truncated
    assert len(result.output) < LIMITS.output_bytes + 100
