"""Two gateway processes on one PostgreSQL: pause, limits, weight versions and the completion log hold across them."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swe_lightning.gateway.client import Lease
from swe_lightning.records import Outcome

from .conftest import EngineServer, GatewayProcess, ask, code_of, running, until
from .postgres import empty_database, server  # noqa: F401
from .test_operations import scrape, value

Pair = tuple[GatewayProcess, GatewayProcess]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Started at the same moment on an empty database; each has its own directory, both the same key."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    options = ("--max-in-flight", "4", "--max-per-rollout", "3")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        patch.setenv("SWEL_STORE_URL", empty_database(request))
        patch.setenv("SWEL_SIGNING_KEY", "k" * 40)
        made = [pool.submit(stack.enter_context, running(folder, *options)) for folder in folders]
        a, b = (job.result() for job in made)
        yield a, b


@pytest.fixture
def two(pair: Pair, engine: EngineServer) -> Pair:
    a, b = pair
    a.client.register_model(engine.url, version=1)
    until(lambda: [(m["url"], m["version"]) for m in b.client.models()] == [(engine.url, 1)])
    return pair


def through(gateway: GatewayProcess, lease: Lease) -> Lease:
    """The lease of another gateway, used at this one."""
    path = lease.base_url.split("/", 3)[3]
    return dataclasses.replace(lease, base_url=f"{gateway.url}/{path}")


def test_pause_drain_versions_and_resume_hold_across(two: Pair, engine: EngineServer) -> None:
    a, b = two
    lease = a.lease(rollout_id="paused")
    engine.engine.latency_s = 0.6
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, through(b, lease), "one")
        until(lambda: engine.engine.active == 1)
        a.client.pause(drain_s=20)
        assert engine.engine.active == 0
        assert first.result().status_code == 200
        held = [pool.submit(ask, through(g, lease), "held") for g in two]
        until(lambda: a.client.state()["waiting"] == 2)
        assert sum(value(scrape(g), "waiting") for g in two) == 2, "metrics of several gateways add up"
        time.sleep(0.3)
        assert engine.engine.active == 0
        assert b.client.state()["paused"]
        a.client.register_model(engine.url, version=2)
        b.client.resume()
        assert [job.result().status_code for job in held] == [200, 200]
    calls = b.client.calls("paused")
    assert [(c.version_start, c.version_end) for c in calls] == [(1, 1), (2, 2), (2, 2)]
    assert all(c.trainable for c in calls)
    until(lambda: a.client.state()["in_flight"] == 0)


def test_a_model_removed_at_one_gateway_is_gone_at_the_other(two: Pair, engine: EngineServer) -> None:
    a, b = two
    a.client.register_model("http://127.0.0.1:9", version=3, name="second")
    until(lambda: {m["url"]: m["name"] for m in b.client.models()}.get("http://127.0.0.1:9") == "second")
    b.client.delete_model("http://127.0.0.1:9")
    until(lambda: [m["url"] for m in a.client.models()] == [engine.url], 10)


def test_global_and_rollout_limits_hold_across(two: Pair, engine: EngineServer) -> None:
    a, b = two
    leases = [a.lease() for _ in range(6)]
    engine.engine.latency_s = 0.3
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], engine.engine.active)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(ask, through(g, lease)) for lease in leases for g in two]
        assert [job.result().status_code for job in jobs] == [200] * 12
        stop.set()
        watcher.join()
        assert 3 <= most[0] <= 4
        engine.engine.latency_s = 1.5
        three = [pool.submit(ask, through(g, leases[0])) for g in (a, a, b)]
        until(lambda: engine.engine.active == 3)
        assert code_of(ask(through(b, leases[0]))) == (429, "rollout_busy")
        assert [job.result().status_code for job in three] == [200] * 3
    assert ask(through(b, leases[0])).status_code == 200


def test_a_killed_gateway_gives_its_places_back_when_it_is_started_again(two: Pair, engine: EngineServer) -> None:
    a, b = two
    leases = [a.lease() for _ in range(4)]
    engine.engine.latency_s = 30
    with ThreadPoolExecutor(5) as pool:
        lost = [pool.submit(ask, through(a, lease)) for lease in leases]
        until(lambda: engine.engine.active == 4)
        a.kill()
        assert all(job.exception() is not None for job in lost)
        until(lambda: engine.engine.active == 0)
        engine.engine.latency_s = 0
        waiting = pool.submit(ask, through(b, leases[0]))
        time.sleep(0.5)
        assert not waiting.done()
        a.start()
        assert waiting.result(timeout=5).status_code == 200, "at once, and not only when the lease is over"


def test_a_long_poll_hears_what_the_other_gateway_committed(two: Pair) -> None:
    a, b = two
    lease = a.lease()
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(b.client.terminal, after=b.client.terminal()[1], wait_s=30)
        time.sleep(0.5)
        ended = time.monotonic()
        a.client.report(lease.rollout.rollout_id, 1, Outcome(reward=1.0), token=lease.grade_token)
        assert [r.rollout_id for r in poll.result()[0]] == [lease.rollout.rollout_id]
        assert time.monotonic() - ended < 5
    until(lambda: code_of(ask(through(b, lease))) == (409, "rollout_ended"))


def test_another_runs_key_and_a_password_in_argv_are_refused(
    two: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEL_SIGNING_KEY", "x" * 40)
    base = [sys.executable, "-m", "swe_lightning.gateway.server", "--run", str(tmp_path / "c")]
    for extra, words in (([], "another signing key"), (["--store", "postgresql://u:secret@h/d"], "password")):
        done = subprocess.run([*base, *extra], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert words in done.stderr
        assert "secret" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
