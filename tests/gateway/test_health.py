"""Model servers that die, hang and come back, as real processes; the gateway's own end under SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai

from swe_lightning.controller.supervisor import free_port
from swe_lightning.gateway.client import Lease
from swe_lightning.gateway.health import HealthChecks, HealthLimits
from swe_lightning.gateway.upstream import Upstreams

from .conftest import EngineServer, GatewayProcess, ask, code_of, http, running, until

FAST = ("--health-interval-s", "0.1", "--health-timeout-s", "0.5", "--health-failures", "2")


class EngineProcess:
    """`python -m swe_lightning.gateway.fakes` on a port of its own."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.port, self.latency_s = free_port(), latency_s
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "swe_lightning.gateway.fakes", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--latency-s", str(self.latency_s)])
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return http.get(f"{self.url}/health", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def engines(count: int, latency_s: float = 0.0) -> Iterator[list[EngineProcess]]:
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            started.append(EngineProcess(latency_s))
            stack.callback(started[-1].kill)
        yield started


def healthy(gateway: GatewayProcess, engine: EngineProcess) -> bool:
    return {m["url"]: m["healthy"] for m in gateway.client.models()}[engine.url]


def used(gateway: GatewayProcess, lease: Lease) -> list[str | None]:
    return [call.upstream for call in gateway.client.calls(lease.rollout.rollout_id)]


def on(gateway: GatewayProcess, engine: EngineProcess, leases: list[Lease]) -> Lease:
    return next(lease for lease in leases if used(gateway, lease)[-1] == engine.url)


def test_a_server_that_dies_is_left_and_comes_back(tmp_path: Path) -> None:
    with engines(2) as (first, second), running(tmp_path, *FAST) as gateway:
        leases = [gateway.lease(register=e.url) for e in (first, second)]
        for lease in leases:
            assert ask(lease).status_code == 200
        moving = on(gateway, second, leases)
        second.kill()
        until(lambda: not healthy(gateway, second))
        assert healthy(gateway, first)
        assert ask(moving).status_code == 200
        last = gateway.client.calls(moving.rollout.rollout_id)[-1]
        assert (last.upstream, last.retries) == (first.url, 0), "the checks knew before the call did"
        second.start()
        until(lambda: healthy(gateway, second))
        assert ask(moving).status_code == 200
        assert used(gateway, moving)[-1] == first.url, "its prefix cache is there now"
        fresh = [gateway.lease() for _ in range(4)]
        for lease in fresh:
            assert ask(lease).status_code == 200
        assert second.url in {used(gateway, lease)[-1] for lease in fresh}


def test_calls_in_a_server_that_hangs_move(tmp_path: Path) -> None:
    """Stopped, it accepts connections and never answers: only active checks can tell."""
    with engines(2) as (first, second), running(tmp_path, *FAST) as gateway:
        leases = [gateway.lease(register=e.url) for e in (first, second)]
        for lease in leases:
            assert ask(lease).status_code == 200
        stuck = on(gateway, first, leases)
        first.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert ask(stuck).status_code == 200
            assert time.monotonic() - started < 20
        finally:
            first.signal(signal.SIGCONT)
        last = gateway.client.calls(stuck.rollout.rollout_id)[-1]
        assert (last.upstream, last.retries, last.trainable) == (second.url, 1, True)


def test_calls_in_the_only_server_are_not_given_up(tmp_path: Path) -> None:
    with engines(1, latency_s=0.5) as (only,), running(tmp_path, *FAST) as gateway:
        lease = gateway.lease(register=only.url)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, lease)
            time.sleep(0.2)
            only.signal(signal.SIGSTOP)
            until(lambda: not healthy(gateway, only))
            only.signal(signal.SIGCONT)
            assert answer.result().status_code == 200
        assert gateway.client.calls(lease.rollout.rollout_id)[-1].retries == 0


def test_a_server_without_health_is_asked_for_its_models() -> None:
    engine = EngineServer()
    engine.engine.health = 404
    engine.engine.behaviour = lambda path, _: (200, b"{}", {}) if path == "/v1/models" else None

    async def scenario() -> None:
        upstreams = Upstreams()
        upstreams.register(url=engine.url, name="policy", version=1, max_context=None)
        checks = HealthChecks(upstreams, HealthLimits(interval_s=0.02, fail_after=1))
        checks.start()
        async with asyncio.timeout(10):
            while len(engine.engine.seen) < 3:
                await asyncio.sleep(0.02)
        await checks.stop()
        (endpoint,) = upstreams.all()
        assert (endpoint.healthy, endpoint.checks_failed) == (True, 0)

    asyncio.run(scenario())
    engine.stop()


def test_a_call_that_cannot_connect_takes_another_server(engine: EngineServer) -> None:
    """Also before the health checks have noticed."""

    async def scenario() -> None:
        upstreams = Upstreams()
        await upstreams.start()
        dead = f"http://127.0.0.1:{free_port()}"
        for url in (dead, engine.url):
            upstreams.register(url=url, name="policy", version=1, max_context=None)
        assert upstreams.endpoint_of("r").url == dead
        async with asyncio.timeout(10):
            reply = await upstreams.post("r", "chat/completions", {"messages": []})
        assert (reply.endpoint.url, reply.retries) == (engine.url, 1)
        await upstreams.close()

    asyncio.run(scenario())


def test_a_request_is_sent_again_only_so_often(tmp_path: Path) -> None:
    """A server that dies over each request: sent once and `max_resends` times more, then refused and recorded."""
    served: list[int] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running(tmp_path, "--health-interval-s", "0", "--max-resends", "2") as gateway,
    ):
        listener.settimeout(20)

        def drop_all() -> None:
            with contextlib.suppress(OSError):  # until the listener is shut down
                while True:
                    connection, _ = listener.accept()
                    served.append(len(connection.recv(65536)))
                    connection.close()

        thread = threading.Thread(target=drop_all)
        thread.start()
        lease = gateway.lease(register=f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert code_of(ask(lease)) == (502, "upstream_error")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        call = gateway.client.calls(lease.rollout.rollout_id)[-1]
        assert (len(served), call.retries, call.reason) == (3, 2, "upstream_error")


def test_sigterm_finishes_what_is_in_flight_and_types_the_rest(tmp_path: Path) -> None:
    engine = EngineServer()
    engine.engine.latency_s = 1.0
    with running(tmp_path, "--grace-s", "5") as gateway:
        lease = gateway.lease(register=engine.url)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(ask(lease)))
        thread.start()
        until(lambda: engine.engine.active == 1)
        gateway.process.send_signal(signal.SIGTERM)
        until(lambda: http.get(f"{gateway.url}/healthz").status_code == 503)
        late = ask(lease, "too late")
        assert code_of(late) == (503, "shutting_down")
        assert late.headers["retry-after"] == "2"
        thread.join()
        assert answers[0].status_code == 200
        assert gateway.process.wait(10) == 0
        gateway.start()
        assert [c.trainable for c in gateway.client.calls(lease.rollout.rollout_id)] == [True]
    engine.stop()


def test_sigterm_has_a_deadline(tmp_path: Path) -> None:
    """Held and hopeless calls get a typed 503 in time, which a stock client survives; each is recorded."""
    engine = EngineServer()
    engine.engine.latency_s = 60.0
    with running(tmp_path, "--grace-s", "0.5") as gateway:
        lease, other = gateway.lease(register=engine.url), gateway.lease()
        answers: dict[str, httpx.Response] = {}
        flying = threading.Thread(target=lambda: answers.update(flying=ask(lease)))
        flying.start()
        until(lambda: engine.engine.active == 1)
        gateway.client.pause(drain_s=None)
        held = threading.Thread(target=lambda: answers.update(held=ask(other)))
        held.start()
        until(lambda: gateway.client.state()["waiting"] == 1)
        started = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        flying.join()
        held.join()
        assert {name: code_of(a) for name, a in answers.items()} == dict.fromkeys(
            ("flying", "held"), (503, "shutting_down")
        )
        assert gateway.process.wait(10) == 0
        assert time.monotonic() - started < 6
        engine.engine.latency_s = 0.0
        patient = openai.OpenAI(base_url=lease.base_url, api_key=lease.agent_token, max_retries=8)
        gateway.start()
        gateway.client.resume()
        reply = patient.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
        assert reply.choices[0].message.content == "ok"
        assert [c.reason for c in gateway.client.calls(lease.rollout.rollout_id)] == ["aborted", None]
    engine.stop()


def test_the_log_tells_what_happened_and_nothing_that_was_said(tmp_path: Path) -> None:
    engine = EngineServer()
    engine.engine.behaviour = lambda _p, body: (500, f"cannot digest {body['messages']}".encode(), {})
    with running(tmp_path) as gateway:
        lease = gateway.lease(register=engine.url)
        ask(lease, "the quick brown secret")
        engine.engine.behaviour = None
        ask(lease, "the quick brown secret", token="a-wrong-token-shown")
        ask(lease, "the quick brown secret")
        gateway.client.pause()
        gateway.stop()
        text = (tmp_path / "logs" / "gateway.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert {"serving", "model call failed", "paused", "stopping", "stopped"} <= {line["message"] for line in lines}
        failed = next(line for line in lines if line["message"] == "model call failed")
        assert (failed["rollout"], failed["code"]) == (lease.rollout.rollout_id, "upstream_error")
        key = (tmp_path / "keys" / "signing.key").read_text().strip()
        for secret in (lease.agent_token, gateway.keyring.mint("control")[:60], key, "quick brown", "wrong-token"):
            assert secret not in text
    engine.stop()
