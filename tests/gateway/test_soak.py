"""Many rollouts from creation to reward leave nothing behind in the gateway: no memory, file, task or table entry."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path

import psutil
import pytest

from swe_lightning.records import Outcome

from .conftest import EngineServer, GatewayProcess, ask, http, running, until

WORKERS = 8
TEXT = "a conversation that is long enough to be read from the bytes: " * 40


def play(gateway: GatewayProcess, name: str, calls: int) -> None:
    """One rollout: a growing conversation, an event, a reward; every third is lost once and tried again."""
    lease = gateway.lease(rollout_id=name, max_attempts=2)
    messages = [{"role": "system", "content": f"{name} {TEXT}"}]
    for turn in range(calls):
        messages.append({"role": "user", "content": f"turn {turn}"})
        reply = ask(lease, messages=messages, tools=None).json()
        messages.append(reply["choices"][0]["message"])
    gateway.client.add_event(name, 1, "note", {"calls": calls}, token=lease.agent_token)
    attempt = 1
    if name.endswith(("0", "3", "6", "9")):
        gateway.client.release(name, 1, "worker_lost")  # type: ignore[arg-type]
        lease = gateway.client.claim(name, "again")
        ask(lease, messages=messages)
        attempt = 2
    gateway.client.report(name, attempt, Outcome(reward=1.0), token=lease.grade_token)


def played(gateway: GatewayProcess, prefix: str, rollouts: int, calls: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        done = [pool.submit(play, gateway, f"{prefix}{n}", calls) for n in range(rollouts)]
        for one in done:
            one.result()


def at_rest(gateway: GatewayProcess) -> dict[str, int]:
    """What the process holds once nothing happens any more: idle connections have gone, tables are counted."""
    process = psutil.Process(gateway.process.pid)
    until(lambda: sum(c.raddr != () for c in process.net_connections("tcp")) <= WORKERS * 4 + 8)
    metrics = http.get(f"{gateway.url}/metrics", headers={"authorization": f"Bearer {gateway.keyring.mint('control')}"})
    kept = dict(re.findall(r'swel_gateway_kept\{table="(\w+)"\} (\d+)', metrics.text))
    return {
        "rss_mb": process.memory_info().rss >> 20,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        **{name: int(count) for name, count in kept.items()},
    }


def soak(tmp_path: Path, *, warm: int, rollouts: int, calls: int, growth_mb: int) -> None:
    engine = EngineServer()
    with running(tmp_path, "--health-interval-s", "0.5") as gateway:
        gateway.client.register_model(engine.url, version=1)
        played(gateway, "warm", warm, calls)
        engine.engine.seen.clear()
        before = at_rest(gateway)
        played(gateway, "r", rollouts, calls)
        after = at_rest(gateway)
        print(f"before {before}\nafter  {after}")
        for table in ("running", "histories", "placements", "last_prompts", "open_rollouts", "spellings"):
            assert after[table] == 0, f"{table} keeps {after[table]} entries of rollouts that have ended"
        assert after["tasks"] <= before["tasks"] + 2 * WORKERS
        assert after["files"] <= before["files"] + 2 * WORKERS + 8
        assert after["threads"] <= before["threads"] + 8
        assert after["rss_mb"] <= before["rss_mb"] + growth_mb
        state = gateway.client.state()
        assert (state["in_flight"], state["waiting"]) == (0, 0)
        assert state["rollouts_by_state"]["succeeded"] == warm + rollouts
    engine.stop()


def test_a_hundred_rollouts_leave_nothing_behind(tmp_path: Path) -> None:
    soak(tmp_path, warm=30, rollouts=100, calls=3, growth_mb=24)


@pytest.mark.slow
def test_a_thousand_rollouts_leave_nothing_behind(tmp_path: Path) -> None:
    soak(tmp_path, warm=100, rollouts=1000, calls=4, growth_mb=40)
