"""The process: killed at any moment it loses nothing it acknowledged; a second one is a clear sentence."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import GatewayClient, Lease
from swe_lightning.records import Outcome, Rollout

from .conftest import EngineServer, GatewayProcess, ask, running, until


class Load:
    """Agents that ask and post events without pause, noting what was acknowledged."""

    def __init__(self, gateway: GatewayProcess, leases: list[Lease]) -> None:
        self.gateway, self.leases = gateway, leases
        self.stop = threading.Event()
        self.asked: dict[str, list[str]] = {lease.rollout.rollout_id: [] for lease in leases}
        self.noted: dict[str, list[int]] = {lease.rollout.rollout_id: [] for lease in leases}
        self.threads = [threading.Thread(target=self._agent, args=(lease,)) for lease in leases]
        self.threads += [threading.Thread(target=self._notes, args=(lease,)) for lease in leases]
        for thread in self.threads:
            thread.start()

    def _agent(self, lease: Lease) -> None:
        """No retries here: what is not answered is not acknowledged."""
        n = 0
        while not self.stop.is_set():
            n += 1
            try:
                response = ask(lease, f"question {n}")
            except httpx.TransportError:
                self.stop.wait(0.1)
                continue
            assert response.status_code == 200
            self.asked[lease.rollout.rollout_id].append(f"question {n}")

    def _notes(self, lease: Lease) -> None:
        """Through the client, which repeats what was not answered: every note must be there once."""
        client = GatewayClient(self.gateway.url, lease.agent_token, patience_s=60)
        n = 0
        while not self.stop.is_set():
            n += 1
            client.add_event(lease.rollout.rollout_id, 1, "note", {"n": n})
            self.noted[lease.rollout.rollout_id].append(n)
        client.close()

    def until_each_got(self, more: int) -> None:
        """Until every agent and every note-taker has that many more acknowledgements."""
        counts = [(done, len(done)) for done in (*self.asked.values(), *self.noted.values())]
        until(lambda: all(len(done) >= before + more for done, before in counts))

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_a_kill_loses_nothing_acknowledged_and_clients_repeat_nothing(tmp_path: Path) -> None:
    """Many kills: test_kills.py. Here clients repeat what was not answered."""
    rng = random.Random(1)
    engine = EngineServer()
    with running(tmp_path) as gateway:
        gateway.client.register_model(engine.url, version=3)
        load = Load(gateway, [gateway.lease(rollout_id=f"r{i}") for i in range(4)])
        load.until_each_got(5)
        time.sleep(rng.uniform(0, 0.05))
        gateway.kill()
        gateway.start()
        load.until_each_got(2)
        load.finish()
        for name, asked in load.asked.items():
            events = gateway.client.events(name)
            assert [e["sequence"] for e in events] == list(range(1, len(events) + 1))
            calls = gateway.client.calls(name)
            recorded = [c.request["messages"][0]["content"] for c in calls]
            assert len(recorded) == len(set(recorded)), "a call is there twice"
            assert set(asked) <= set(recorded), "an acknowledged call is missing"
            assert all(c.trainable and c.response_ids.size == 3 for c in calls)
            notes = [e["data"]["n"] for e in events if e["kind"] == "note"]
            assert notes == load.noted[name]
        assert gateway.client.models()[0]["version"] == 3
    engine.stop()


def test_a_restart_is_invisible_and_keeps_the_pause(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        lease = gateway.lease(rollout_id="done")
        gateway.client.report("done", 1, Outcome(reward=1.0), token=lease.grade_token)
        gateway.lease(rollout_id="open")
        gateway.client.pause(drain_s=None)
        gateway.kill()
        with pytest.raises(GatewayError, match="unreachable"):
            GatewayClient(gateway.url, "x", patience_s=0.1).state()
        patient, results = gateway.client, list[list[Rollout]]()
        new = Rollout(rollout_id="a", group_id="g")
        thread = threading.Thread(target=lambda: results.append(patient.create_rollouts([new])))
        thread.start()
        gateway.start()
        thread.join()
        assert results[0][0].state == "queuing"
        assert gateway.client.state()["paused"]
        assert gateway.client.state()["rollouts_by_state"]["running"] == 1
        assert [r.rollout_id for r in gateway.client.terminal()[0]] == ["done"]
        gateway.client.resume()
        assert not gateway.client.state()["paused"]
        assert gateway.client.add_event("open", 1, "note", {}) == 2
        started = time.monotonic()
        assert gateway.stop() in (0, -15)
        assert time.monotonic() - started < 8


def serve_again(run: Path, port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swe_lightning.gateway.server", "--run", str(run), "--port", str(port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_taken_port_or_run_is_one_sentence(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    for run, port, words in ((tmp_path, shared_gateway.port, "in use"), (shared_gateway.run, 0, "another gateway")):
        second = serve_again(run, port)
        assert second.returncode == 2
        assert words in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
    assert shared_gateway.client.state()


def test_the_signing_key_is_private(shared_gateway: GatewayProcess) -> None:
    assert oct(os.stat(shared_gateway.run / "keys" / "signing.key").st_mode & 0o777) == "0o600"
