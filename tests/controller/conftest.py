"""A whole machine in miniature: real gateway process, real controller and workers, real sandboxes, tiny task
repository; the model is a script behind the engine's HTTP layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.gateway.client import GatewayClient
from swe_lightning.gateway.fakes import chat_reply
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Rollout
from swe_lightning.rundir import RunDir

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
TESTS = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
KEPT = "from calc import add\n\n\ndef test_zero():\n    assert add(4, 0) == 4\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = "sed -i 's/a - b/a + b/' calc.py"


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


class ScriptedModel:
    """Answers turn n of a rollout with entry n of the script named in its issue text; a callable is called first."""

    def __init__(self, scripts: dict[str, list[Any]]) -> None:
        self.scripts = scripts
        self.calls: list[str] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet per answer

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                data = json.dumps(chat_reply(body, model.answer(body["messages"]))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, messages: list[dict[str, Any]]) -> str:
        name = next(n for n in self.scripts if f"script={n};" in messages[1]["content"])
        self.calls.append(name)
        turn = sum(m["role"] == "assistant" for m in messages)
        entry = self.scripts[name][turn]
        return block(entry() if callable(entry) else entry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def make_repository(path: Path, instances: list[str]) -> None:
    """A git repository with one branch per instance: base, then `Bug Patch`, then `Remove F2P Tests`."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, *arguments], cwd=path, check=True, capture_output=True)

    path.mkdir(parents=True)
    (path / "tests").mkdir()
    for name, text in {"calc.py": RIGHT, "tests/test_add.py": TESTS, "tests/test_zero.py": KEPT}.items():
        (path / name).write_text(text)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    for instance in instances:
        git("checkout", "-q", "-B", instance, "main")
        (path / "calc.py").write_text(WRONG)
        git("commit", "-q", "-am", "Bug Patch")
        git("rm", "-q", "tests/test_add.py")
        git("commit", "-q", "-m", "Remove F2P Tests")
    git("checkout", "-q", "main")


class Machine:
    """Everything a rollout needs, as processes that can be killed."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self.repository = root / "repo"
        make_repository(self.repository, ["calc.1"])
        self.keyring = Keyring.load_or_create(RunDir(self.run_dir).key_file)
        self.model = ScriptedModel({})
        self._submitted = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start_gateway(0)
        self.client = GatewayClient(self.url, self.keyring.mint("control"))
        self.client.register_model(self.model.url, version=0, max_context=100_000)

    def start_gateway(self, port: int) -> subprocess.Popen[bytes]:
        announced = self.run_dir / "gateway.json"
        announced.unlink(missing_ok=True)
        command = ["-m", "swe_lightning.gateway.server", "--run", str(self.run_dir), "--port", str(port)]
        process = self._start(command, "gateway.log")
        wait_for(lambda: announced.exists() or process.poll() is not None, 90)
        self.url = json.loads(announced.read_text())["url"]
        return process

    def start_controller(self, workers: int = 1, concurrency: int = 4, **options: Any) -> subprocess.Popen[bytes]:
        code = (
            "from pathlib import Path\n"
            "from swe_lightning.controller.local import run_controller\n"
            "from swe_lightning.gateway.tokens import Keyring\n"
            "from swe_lightning.rundir import RunDir\n"
            f"run = Path({str(self.run_dir)!r})\n"
            "token = Keyring.load_or_create(RunDir(run).key_file).mint('control')\n"
            f"run_controller(gateway_url={self.url!r}, token=token, workers={workers}, concurrency={concurrency},"
            f" run_dir=run, **{options!r})\n"
        )
        return self._start(["-c", code], "controller.log")

    def submit(
        self, scripts: dict[str, list[Any]], *, timeout_s: float = 60, show_tests: bool = False, **config: Any
    ) -> list[str]:
        """One rollout per script (name -> a command per turn); returns their ids."""
        self._submitted += 1
        self.model.scripts |= scripts
        sections = {
            "harness": {"step_limit": 10},
            "sandbox": {"memory_mb": 512, "disk_mb": 64, "show_tests": show_tests},
            "grading": {"timeout_s": 30},
        }
        rollouts = [
            Rollout(
                rollout_id=f"{name}-{self._submitted}",
                group_id="g",
                task=self.task(name),
                timeout_s=timeout_s,
                config={**sections, **config},
            )
            for name in scripts
        ]
        return [r.rollout_id for r in self.client.create_rollouts(rollouts)]

    def task(self, script: str) -> dict[str, Any]:
        return {
            "instance_id": "calc.1",
            "repo": "calc",
            "repo_path": str(self.repository),
            "problem_statement": f"script={script}; Adding two numbers gives a wrong sum.",
            "FAIL_TO_PASS": ["tests/test_add.py::test_add"],
            "PASS_TO_PASS": ["tests/test_zero.py::test_zero"],
            "test_cmd": "python -m pytest -q",
            "test_env": {"PYTHONPATH": "."},
        }

    def wait(self, ids: list[str], seconds: float = 120) -> list[Rollout]:
        wait_for(lambda: all(self.client.get_rollout(i).state.terminal for i in ids), seconds, self.logs)
        return [self.client.get_rollout(i) for i in ids]

    def workers(self, controller: subprocess.Popen[bytes]) -> list[int]:
        import psutil

        children = psutil.Process(controller.pid).children()
        return [p.pid for p in children if "swe_lightning.controller.worker" in p.cmdline()]

    def logs(self) -> str:
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        for process in reversed(self.processes):
            self.stop(process)
        self.model.close()

    def _start(self, arguments: list[str], log: str) -> subprocess.Popen[bytes]:
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "logs" / log).open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.processes.append(process)
        return process


def wait_for(condition: Callable[[], bool], seconds: float, on_timeout: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain\n{on_timeout()}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Gateway and model of one test module; tests add their scripts and start their controllers."""
    made = Machine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()
