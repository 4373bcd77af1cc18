"""A warm worker process: everything is imported once, then many rollouts run in its threads.

Started by the controller as `python -m swe_lightning.controller.worker`. Reads leases from stdin, reports outcomes to
the gateway with each lease's own grade token, and tells the controller on stdout. It dies with the controller (parent
death signal, and end of input), takes its sandboxes along, and has no token beyond those of its leases.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swe_lightning.controller.protocol import Done, Job, line, parse
from swe_lightning.controller.runner import RolloutRunner, real_rooms
from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import GatewayClient

logger = logging.getLogger("worker")
_PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 4.0
REPORT_PATIENCE_S = 120.0
"""How long an outcome waits for a gateway that restarts before the attempt is given up."""


class Worker:
    """Threads that run leases; one line per finished one goes to `out` (a file descriptor)."""

    def __init__(self, runner: RolloutRunner, gateway: GatewayClient, *, slots: int, out: int) -> None:
        self._runner = runner
        self._gateway = gateway
        self._out = out
        self._write_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="rollout")

    def say(self, data: bytes) -> None:
        with self._write_lock:
            while data:
                data = data[os.write(self._out, data) :]

    def handle(self, data: bytes) -> None:
        message = parse(data)
        if message["type"] == "run":
            self._pool.submit(self._work, Job.decode(message))
        elif message["type"] == "cancel":
            # Not in the pool: its threads may all be busy with the very rollouts that are to end.
            key = (message["rollout_id"], message["attempt"])
            threading.Thread(target=self._runner.cancel, args=(key,), daemon=True).start()

    def _work(self, job: Job) -> None:
        start = time.monotonic()
        outcome = self._runner.run(job)
        outcome.reported_by = f"worker {os.getpid()}"
        reported = True
        try:
            self._gateway.report(job.rollout.rollout_id, job.attempt, outcome, token=job.grade_token)
        except GatewayError as error:
            # 409: the attempt was released or cancelled meanwhile. That is settled, not lost.
            reported = error.status == 409
            logger.warning("%s attempt %d: outcome refused: %s", job.rollout.rollout_id, job.attempt, error)
        except Exception:
            reported = False
            logger.exception("%s attempt %d: outcome not reported", job.rollout.rollout_id, job.attempt)
        ended = outcome.exit_status if outcome.infra_reason is None else f"infra:{outcome.infra_reason}"
        seconds = round(time.monotonic() - start, 3)
        self.say(Done(job.rollout.rollout_id, job.attempt, reported, ended, seconds).encode())

    def stop(self) -> None:
        """Take all boxes down and leave at once: unfinished rollouts are the controller's to release."""
        threading.Timer(STOP_GRACE_S, os._exit, (1,)).start()
        self._runner.destroy_all()
        os._exit(0)


def die_with_parent(parent: int) -> None:
    """SIGTERM when the controller is gone, also if it went before this line was reached."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # stdout carries the protocol: give it a descriptor of its own, so that a stray print cannot corrupt it.
    out = os.dup(1)
    os.dup2(2, 1)

    runner = RolloutRunner(options.run_dir, real_rooms(options.run_dir), label=options.label)
    worker = Worker(
        runner, GatewayClient(options.gateway, "", patience_s=REPORT_PATIENCE_S), slots=options.slots, out=out
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.say(line("ready", pid=os.getpid()))
    for data in sys.stdin.buffer:
        worker.handle(data)
    worker.stop()


if __name__ == "__main__":
    main()
