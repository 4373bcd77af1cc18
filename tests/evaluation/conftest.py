"""A real gateway process and a stand-in for the controller that ends rollouts as a test says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swe_lightning.gateway.client import GatewayClient
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Outcome, Rollout
from swe_lightning.rundir import RunDir

Decide = Callable[[Rollout], Outcome]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation") / "run"


@pytest.fixture(scope="module")
def gateway(run_dir: Path) -> Iterator[GatewayClient]:
    process = subprocess.Popen([sys.executable, "-m", "swe_lightning.gateway.server", "--run", str(run_dir)])
    try:
        deadline = time.monotonic() + 60
        while not (run_dir / "gateway.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        url = json.loads((run_dir / "gateway.json").read_bytes())["url"]
        token = Keyring.load_or_create(RunDir(run_dir).key_file).mint("control", ttl_s=600)
        with GatewayClient(url, token) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def controller(gateway: GatewayClient) -> Iterator[Callable[[Decide], list[str]]]:
    """Start ending queued rollouts by `decide`; returns the (growing) list of ids that were run."""
    stop, threads = threading.Event(), []

    def start(decide: Decide) -> list[str]:
        ran: list[str] = []

        def work() -> None:
            while not stop.is_set():
                for rollout in gateway.list_rollouts(state="queuing", wait_s=0.2):
                    lease = gateway.claim(rollout.rollout_id, "test")
                    ran.append(rollout.rollout_id)
                    attempt = lease.rollout.attempt
                    gateway.report(rollout.rollout_id, attempt, decide(lease.rollout), token=lease.grade_token)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return ran

    yield start
    stop.set()
    for thread in threads:
        thread.join(10)
