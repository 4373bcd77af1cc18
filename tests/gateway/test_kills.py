"""A hundred deaths under load: what was acknowledged is there, once, with dense numbers.

Gateways are forked from a process that has imported everything, so a start costs milliseconds; each is a real process
on a real port and dies by SIGKILL at a random moment.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import GatewayClient, Lease
from swe_lightning.gateway.server import serve
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Rollout

from .conftest import EngineServer, ask, code_of, http, until
from .postgres import Postgres, empty_database, server  # noqa: F401

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["swe_lightning.gateway.app", "swe_lightning.gateway.shutdown", "psycopg", "uvicorn"])


class ForkedGateway:
    def __init__(self, run: Path, store_url: str | None = None) -> None:
        self.run, self.store_url = run, store_url
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        self.client = GatewayClient(self.url, Keyring.load_or_create(run / "keys" / "signing.key").mint("control"))

    def start(self) -> None:
        options = {"run_dir": self.run, "port": self.port, "store_url": self.store_url, "log_level": "warning"}
        self.process = FORKS.Process(target=serve, kwargs=options, daemon=True)
        self.process.start()
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process.is_alive()
        try:
            return http.get(f"{self.url}/healthz", timeout=5).is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Load:
    """Agents that ask, and take notes, without pause; both note what was acknowledged and repeat nothing."""

    def __init__(self, leases: list[Lease]) -> None:
        self.stop = threading.Event()
        self.acknowledged: dict[str, set[str]] = {lease.rollout.rollout_id: set() for lease in leases}
        self.refused: list[tuple[int, str]] = []
        self.threads = [threading.Thread(target=t, args=(lease,)) for lease in leases for t in (self._ask, self._note)]
        for thread in self.threads:
            thread.start()

    def _try(self, lease: Lease, text: str, action: Any) -> None:
        try:
            response = action()
        except httpx.TransportError:
            self.stop.wait(0.02)
            return
        if response.is_success:
            self.acknowledged[lease.rollout.rollout_id].add(text)
        else:
            self.refused.append(code_of(response))
            self.stop.wait(0.05)

    def _ask(self, lease: Lease) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            text = f"call {number}"
            self._try(lease, text, lambda text=text: ask(lease, text))

    def _note(self, lease: Lease) -> None:
        url = lease.base_url.split("/proxy/")[0] + f"/api/rollouts/{lease.rollout.rollout_id}/attempt/1/events"
        headers, number = {"authorization": f"Bearer {lease.agent_token}"}, 0
        while not self.stop.is_set():
            number += 1
            text = f"note {number}"
            body = {"type": "note", "data": {"text": text}, "event_id": text}
            self._try(lease, text, lambda body=body: http.post(url, json=body, headers=headers, timeout=60))

    def total(self) -> int:
        return sum(len(a) for a in self.acknowledged.values())

    def until_more(self, count: int) -> None:
        before = self.total()
        until(lambda: self.total() >= before + count)

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def check(client: GatewayClient, load: Load) -> None:
    for name, acknowledged in load.acknowledged.items():
        events = client.events(name)
        assert [e["sequence"] for e in events] == list(range(1, len(events) + 1))
        recorded = [c.request["messages"][-1]["content"] for c in client.calls(name)]
        recorded += [e["data"]["text"] for e in events if e["kind"] == "note"]
        assert len(recorded) == len(set(recorded)), "something is there twice"
        assert acknowledged <= set(recorded), "something acknowledged is missing"


def leases_of(client: GatewayClient, engine: EngineServer, count: int = 3) -> list[Lease]:
    client.register_model(engine.url, version=1)
    client.create_rollouts([Rollout(rollout_id=f"r{i}", group_id="g") for i in range(count)])
    return [client.claim(f"r{i}", "test") for i in range(count)]


def die_and_come_back(gateway: ForkedGateway, engine: EngineServer, kills: int) -> None:
    rng = random.Random(kills)
    try:
        load = Load(leases_of(gateway.client, engine))
        try:
            for _ in range(kills):
                load.until_more(3)
                time.sleep(rng.uniform(0, 0.03))
                gateway.kill()
                gateway.start()
            load.until_more(3)
        finally:
            load.finish()
        assert load.total() > 3 * kills
        check(gateway.client, load)
    finally:
        gateway.kill()
        gateway.client.close()


def with_password_file(url: str, folder: Path) -> str:
    """The URL as it may stand in a command: its password in a file that libpq reads."""
    parsed = sa.make_url(url)
    file = folder / "pgpass"
    file.write_text(f"*:*:*:*:{parsed.password}\n")
    file.chmod(0o600)
    return parsed._replace(password=None).set(query={"passfile": str(file)}).render_as_string()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_kills_lose_nothing_on_sqlite(tmp_path: Path, engine: EngineServer) -> None:
    die_and_come_back(ForkedGateway(tmp_path), engine, 100)


@pytest.mark.slow
def test_kills_lose_nothing_on_postgres(tmp_path: Path, engine: EngineServer, request: pytest.FixtureRequest) -> None:
    gateway = ForkedGateway(tmp_path, with_password_file(empty_database(request), tmp_path))
    die_and_come_back(gateway, engine, 12)


@pytest.mark.slow
def test_crashes_of_the_database_server_lose_nothing(
    tmp_path: Path,
    engine: EngineServer,
    server: Postgres,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    """A short outage is a slow call; one beyond patience is 503 store_unavailable, and over when the server is back."""
    gateway = ForkedGateway(tmp_path, with_password_file(empty_database(request), tmp_path))
    load = Load(leases_of(gateway.client, engine))
    try:
        for _ in range(2):
            load.until_more(10)
            server.stop()
            server.start()
        load.until_more(10)
        assert not load.refused
        server.stop()
        until(lambda: load.refused)
        with pytest.raises(GatewayError, match="store_unavailable"):
            GatewayClient(gateway.url, gateway.client._http.headers["authorization"][7:], patience_s=0).events("r0")
        server.start()
        load.until_more(10)
        assert set(load.refused) == {(503, "store_unavailable")}
    finally:
        load.finish()
    check(gateway.client, load)
    gateway.kill()
    gateway.client.close()
