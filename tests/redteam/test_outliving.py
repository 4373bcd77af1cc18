"""Living on: past a timeout, past destroy, past the owner; or breaking the box to swap a bad rollout for a retry.

Each attack tries for real and asserts that nothing was gained. Where it would succeed on an open machine, the test also
makes sure that the target is there: otherwise "not found" would prove nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from swe_lightning.records import Task
from swe_lightning.sandbox import Backend, Sandbox
from swe_lightning.sandbox.trees import agent_tree

from .conftest import LIMITS, Say, running, wait_for


def test_a_daemon_does_not_survive_a_timeout(box: Sandbox, sh: Say, py: Say) -> None:
    daemon = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "        while True:\n"
        "            open('/tmp/beat', 'w').write(str(time.time())); time.sleep(0.05)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while not os.path.exists('/tmp/beat'): time.sleep(0.01)\n"
        "time.sleep(60)"
    )
    assert box.run(f"python - <<'END'\n{daemon}\nEND", timeout_s=3).timed_out
    first = sh("cat /tmp/beat; sleep 0.4")
    assert first != ""
    assert sh("cat /tmp/beat") == first


def test_a_daemon_does_not_survive_destroy(backend: Backend, task: Task) -> None:
    mark = f"66.{os.getpid()}"
    box = backend.create(agent_tree(task, show_tests=False), limits=LIMITS)
    box.run(f"trap '' HUP TERM; (setsid nohup sleep {mark} >/dev/null 2>&1 &)", timeout_s=20)
    assert wait_for(f"sleep\0{mark}\0", present=True)
    box.destroy()
    assert not running(f"sleep\0{mark}\0")


def test_the_command_server_cannot_be_killed_or_stopped(sh: Say, py: Say) -> None:
    """A box that its agent can break would let it swap a bad rollout for a retry."""
    sh("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; kill -9 -1")
    py("import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\nos.kill(-1, 9)")
    assert sh("echo alive") == "alive\n"


def test_out_of_memory_takes_commands_and_never_the_server(box: Sandbox, sh: Say) -> None:
    for _ in range(3):
        box.run(
            "head -c 100M /dev/zero >/dev/shm/f 2>/dev/null; "
            "for i in 1 2 3 4 5 6; do python -c 'x = b\"x\" * (180 << 20); import time; time.sleep(1)' & done; wait",
            timeout_s=30,
        )
        assert sh("rm -f /dev/shm/f; echo alive") == "alive\n"


def test_removing_everything_leaves_a_box_that_answers(box: Sandbox, sh: Say) -> None:
    sh("rm -rf --no-preserve-root / 2>/dev/null")
    assert box.diff() == {"m.py": None}
    assert sh("echo back >m.py; cat m.py") == "back\n"


def test_a_failed_owner_takes_its_box_along(able: None, task: Task) -> None:
    mark = f"55.{os.getpid()}"
    source = (
        "import sys, os; from pathlib import Path; from swe_lightning.sandbox.local import LocalBackend\n"
        "b = LocalBackend(); box = b.create(Path(sys.argv[1]))\n"
        f"box.run('(setsid sleep {mark} >/dev/null 2>&1 &)', timeout_s=20); print('ready', flush=True)\n"
        "import time; time.sleep(100)"
    )
    tree = agent_tree(task, show_tests=False)
    with subprocess.Popen([sys.executable, "-c", source, str(tree)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert wait_for(f"sleep\0{mark}\0", present=True)
        owner.send_signal(signal.SIGKILL)
    assert wait_for(f"sleep\0{mark}\0", present=False)
