"""A scripted gateway over real HTTP and a box that is a real bash in a scratch directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Refuse:
    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Slow:
    """Answers `text` after `seconds`."""

    seconds: float
    text: str


class Drop:
    """Close the connection without an answer."""


@dataclass
class Hang:
    seconds: float


class ScriptedGateway:
    """Plays its script, one entry per request; a string is the assistant's text. Keeps what it was asked."""

    def __init__(self, script: list[Any], port: int = 0) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                gateway.connections += 1
                gateway._open.append(self.request)
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                gateway.requests.append(json.loads(body))
                gateway.headers.append(dict(self.headers))
                gateway.paths.append(self.path)
                gateway._answer(self, gateway.script.pop(0))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/openai/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _answer(self, handler: BaseHTTPRequestHandler, entry: Any) -> None:
        if isinstance(entry, Drop):
            handler.close_connection = True
            return
        if isinstance(entry, Hang):
            threading.Event().wait(entry.seconds)
            handler.close_connection = True
            return
        if isinstance(entry, Slow):
            threading.Event().wait(entry.seconds)
            entry = entry.text
        status, headers = 200, {}
        if isinstance(entry, Refuse):
            status, headers = entry.status, entry.headers
            payload: Any = {"error": {"message": "scripted", "type": "x", "code": entry.code}}
        elif isinstance(entry, bytes):
            payload = None
        else:
            text, finish = entry if isinstance(entry, tuple) else (entry, "stop")
            payload = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}
        data = entry if payload is None else json.dumps(payload).encode()
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(data)


@dataclass
class Result:
    output: bytes
    exit_code: int
    timed_out: bool = False


class BashBox:
    """Runs commands by bash in a directory. No isolation: the subject here is the harness."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commands: list[str] = []

    def run(self, command: str, *, timeout_s: float) -> Result:
        self.commands.append(command)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            return Result(out, -1, timed_out=True)
        return Result(out, process.returncode)


@pytest.fixture
def box(tmp_path: Path) -> BashBox:
    tree = tmp_path / "tree"
    tree.mkdir()
    return BashBox(tree)


@pytest.fixture
def play(box: BashBox, tmp_path: Path) -> Iterator[Any]:
    """play(script, **overrides) -> (EpisodeResult, ScriptedGateway)"""
    import time

    from swe_lightning.harness.mini_swe_agent import run_episode
    from swe_lightning.recipe import Harness
    from swe_lightning.records import Task

    gateways: list[ScriptedGateway] = []

    def run(script: list[Any], *, seconds: float = 20, url: Any = None, the_box: Any = None, **harness: Any) -> Any:
        gateway = ScriptedGateway(script)
        gateways.append(gateway)
        result = run_episode(
            Task(instance_id="demo.1", repo="demo", problem_statement="It breaks.", FAIL_TO_PASS=["t.py::test_it"]),
            Harness(**harness),
            the_box or box,
            url(gateway.url) if url else gateway.url,
            "secret",
            deadline=time.monotonic() + seconds,
            log_file=tmp_path / "attempt1.jsonl",
        )
        return result, gateway

    yield run
    for gateway in gateways:
        gateway.close()


def bash(command: str) -> str:
    return f"I do this.\n\n```bash\n{command}\n```"


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.fixture
def scripted() -> Any:
    """The script's vocabulary: scripted.bash, scripted.SUBMIT, scripted.Refuse, scripted.Drop, ..."""
    import types

    return types.SimpleNamespace(
        bash=bash,
        SUBMIT=SUBMIT,
        Refuse=Refuse,
        Drop=Drop,
        Hang=Hang,
        Slow=Slow,
        ScriptedGateway=ScriptedGateway,
        BashBox=BashBox,
    )
