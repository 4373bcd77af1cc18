"""A real engine over HTTP (in a thread, so that a test can script it) and the real gateway process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from swe_lightning.gateway.client import GatewayClient, Lease
from swe_lightning.gateway.fakes import FakeEngine
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Rollout

# One for all tests: httpx.post() would read all certificates of the system for each request.
http = httpx.Client(verify=False, trust_env=False, limits=httpx.Limits(max_connections=None))


class EngineServer:
    """A FakeEngine on a real port; can be stopped and started again on the same one."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        application: Any = self.engine
        config = uvicorn.Config(application, port=self.port, access_log=False, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def reset(self) -> None:
        self.engine.latency_s, self.engine.behaviour, self.engine.headers = 0.0, None, {}
        self.engine.seen.clear()
        self.engine.cancelled = 0


class GatewayProcess:
    """`python -m swe_lightning.gateway.server` on a run directory."""

    def __init__(self, run: Path, *options: str) -> None:
        self.run, self.options = run, options
        self.port = 0
        self.start()

    def start(self) -> None:
        (self.run / "gateway.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "swe_lightning.gateway.server", "--run", str(self.run)]
        command += ["--port", str(self.port), *self.options]
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        until(lambda: (self.run / "gateway.json").exists() or self.process.poll() is not None)
        self.url = json.loads((self.run / "gateway.json").read_text())["url"]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.keyring = Keyring.load_or_create(self.run / "keys" / "signing.key")
        self.client = GatewayClient(self.url, self.keyring.mint("control"), patience_s=60)
        self.client.wait_ready()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def lease(self, *, register: str | None = None, mode: str = "train", **rollout: Any) -> Lease:
        """A claimed rollout."""
        if register is not None:
            self.client.register_model(register, version=1)
        rollout_id = rollout.pop("rollout_id", None) or f"r-{uuid.uuid4().hex[:12]}"
        self.client.create_rollouts([Rollout(rollout_id=rollout_id, group_id="g", mode=mode, **rollout)])
        return self.client.claim(rollout_id, "test")


def until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def ask(lease: Lease, text: str = "hi", *, token: str | None = None, **body: Any) -> httpx.Response:
    """One chat call, as a plain client makes it."""
    body = {"model": "any", "messages": [{"role": "user", "content": text}]} | body
    token = lease.agent_token if token is None else token
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return http.post(f"{lease.base_url}/chat/completions", json=body, headers=headers, timeout=60)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@contextlib.contextmanager
def running(run: Path, *options: str) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(run, *options)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.stop()


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[EngineServer]:
    server = EngineServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def shared_gateway(shared_engine: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    options = ("--pause-wait-s", "60", "--max-per-rollout", "3", "--patience-s", "4")
    with running(tmp_path_factory.mktemp("run"), *options) as gateway:
        yield gateway


@pytest.fixture
def engine(shared_engine: EngineServer) -> Iterator[EngineServer]:
    shared_engine.reset()
    yield shared_engine
    shared_engine.reset()


@pytest.fixture
def gateway(shared_gateway: GatewayProcess, engine: EngineServer) -> Iterator[GatewayProcess]:
    """The shared gateway with exactly the shared engine registered, open."""
    for model in shared_gateway.client.models():
        if model["url"] != engine.url:
            shared_gateway.client.delete_model(model["url"])
    shared_gateway.client.register_model(engine.url, version=1)
    yield shared_gateway
    shared_gateway.client.resume()
