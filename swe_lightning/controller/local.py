"""The local controller: reconciles the gateway's rollouts with worker processes on this machine.

    queuing --claim--> a worker --outcome--> gateway          (the worker reports, the controller only keeps books)
    worker dead, hung or restarted: its attempts are released as worker_lost and come back as new attempts
    running at the gateway but in nobody's hands (a controller was killed): released the same way
    in a worker's hands but ended at the gateway (cancelled): its box is taken away

Invariant: whatever this process or a worker dies of, every rollout ends with exactly one outcome. There is one local
controller per gateway. A crash of one rollout never touches its siblings; a crash of a worker process costs its
rollouts one attempt.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from swe_lightning.controller.claimer import Claimer
from swe_lightning.controller.process import WorkerProcess
from swe_lightning.controller.protocol import Job
from swe_lightning.errors import GatewayError, SwelError
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.recipe import Grading, SandboxSection
from swe_lightning.records import InfraReason, RolloutState
from swe_lightning.sandbox import make_backend

logger = logging.getLogger("controller")

OVERDUE_MARGIN_S = 120.0
"""Beyond the rollout's and the grading's own time: starting boxes, exporting trees, a waiting gate."""
RECONCILE_S = 15.0
TICK_S = 0.25
MAX_FAILED_STARTS = 5
LOST = InfraReason.WORKER_LOST


def run_controller(
    *,
    gateway_url: str,
    token: str,
    workers: int,
    concurrency: int,
    run_dir: Path,
    stop: threading.Event | None = None,
    overdue_margin_s: float = OVERDUE_MARGIN_S,
    reconcile_s: float = RECONCILE_S,
) -> None:
    """Serve until `stop` is set (default: until SIGTERM or SIGINT; a second signal leaves at once).

    `workers` processes run up to `concurrency` rollouts each. Stopping releases what is unfinished, so that the next
    controller takes it up. Raises SwelError when workers cannot be started.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = stop or _stop_on_signals()
    controller = Controller(gateway_url, token, workers, concurrency, run_dir, overdue_margin_s, reconcile_s)
    try:
        controller.serve(stop)
    finally:
        controller.close()


class Controller:
    """Single-threaded bookkeeping; claimer and worker pipes feed it through one queue."""

    def __init__(
        self,
        gateway_url: str,
        token: str,
        workers: int,
        concurrency: int,
        run_dir: Path,
        overdue_margin_s: float,
        reconcile_s: float,
    ) -> None:
        self._gateway_url = gateway_url
        self._run_dir = run_dir.absolute()
        self._concurrency = concurrency
        self._overdue_margin_s = overdue_margin_s
        self._reconcile_s = reconcile_s
        self._events: queue.Queue[Any] = queue.Queue()
        # Short patience here: the bookkeeping thread must stay awake for its workers while the gateway restarts.
        self._gateway = GatewayClient(gateway_url, token, patience_s=3)
        self._claimer = Claimer(
            GatewayClient(gateway_url, token, patience_s=10),
            places=workers * concurrency,
            name=f"local:{os.getpid()}",
            found=lambda job: self._events.put(("found", None, job)),
        )
        self._label = f"run-{hashlib.sha256(str(self._run_dir).encode()).hexdigest()[:12]}"
        self._wanted = workers
        self._workers: list[WorkerProcess] = []
        self._started = 0
        self._failed_starts = 0
        self._backlog: list[Job] = []
        self._to_release: dict[tuple[str, int], tuple[InfraReason, str]] = {}
        self._sections: dict[str, SandboxSection] = {}
        self._next_reconcile = 0.0
        self._ready_for_work = False

    def serve(self, stop: threading.Event) -> None:
        for _ in range(self._wanted):
            self._spawn()
        while not stop.is_set():
            try:
                self._handle(*self._events.get(timeout=TICK_S))
                while True:
                    self._handle(*self._events.get_nowait())
            except queue.Empty:
                pass
            self._dispatch()
            self._check_overdue()
            self._release_pending()
            if time.monotonic() >= self._next_reconcile:
                self._reconcile()

    def close(self) -> None:
        """End the workers and release what they had. Idempotent."""
        self._claimer.stop(timeout_s=3)
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.end(grace_s=3)
        while not self._events.empty():
            kind, _, payload = self._events.get_nowait()
            if kind == "found":
                self._backlog.append(payload)
        keys = [job.key for job in self._backlog] + [key for w in self._workers for key in w.running]
        self._to_release |= dict.fromkeys(keys, (LOST, "the controller was stopped"))
        self._workers, self._backlog = [], []
        self._release_pending()
        self._collect_garbage()

    def _handle(self, kind: str, worker: WorkerProcess | None, payload: Any) -> None:
        if kind == "found":
            self._backlog.append(payload)
        elif worker is not None and kind == "said" and payload["type"] == "ready":
            worker.ready, self._failed_starts = True, 0
            logger.info("worker %d is ready (pid %d)", worker.number, payload["pid"])
        elif worker is not None and kind == "said" and payload["type"] == "done":
            self._done(worker, payload)
        elif worker is not None and kind == "ended":
            self._ended(worker)

    def _done(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        key = (message["rollout_id"], message["attempt"])
        if worker.running.pop(key, None) is None:
            return
        self._claimer.give_back()
        logger.info("%s attempt %d: %s in %.1f s", *key, message["ended"], message["seconds"])
        if not message["reported"]:
            self._to_release[key] = LOST, "its outcome could not be reported"
        self._end_if_empty(worker)

    def _ended(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        code = worker.process.returncode
        logger.warning("worker %d ended with %s holding %d rollouts", worker.number, code, len(worker.running))
        for key in worker.running:
            self._to_release[key] = LOST, f"worker {worker.number} ended with exit code {code}"
            self._claimer.give_back()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise SwelError(f"worker processes do not start:\n{worker.log_tail()}")
        self._collect_garbage()
        self._fill_up()

    def _fill_up(self) -> None:
        while sum(not w.retiring for w in self._workers) < self._wanted:
            self._spawn()

    def _spawn(self) -> None:
        self._started += 1
        self._workers.append(
            WorkerProcess(
                self._started, gateway_url=self._gateway_url, run_dir=self._run_dir, slots=self._concurrency,
                label=self._label, events=self._events,
            )
        )  # fmt: skip

    def _dispatch(self) -> None:
        """Give each claimed rollout to the worker with most free places; without any it waits."""
        while self._backlog:
            worker = max(self._workers, key=lambda w: w.free, default=None)
            if worker is None or worker.free <= 0:
                return
            job = self._backlog.pop(0)
            try:
                self._give(job, worker)
            except Exception as error:
                # A rollout that cannot even be handed out (a config that is not one) must not end its siblings.
                logger.warning("%s attempt %d cannot be run: %s", *job.key, error)
                self._to_release[job.key] = InfraReason.HARNESS_CRASH, f"the rollout cannot be run: {error}"
                self._claimer.give_back()
            self._claimer.settled(job.rollout.rollout_id)

    def _give(self, job: Job, worker: WorkerProcess) -> None:
        config = job.rollout.config
        grading = Grading.model_validate(config.get("grading", {}))
        section = SandboxSection.model_validate(config.get("sandbox", {}))
        self._sections.setdefault(section.backend, section)
        worker.give(job, overdue_after_s=job.rollout.timeout_s + 2 * grading.timeout_s + self._overdue_margin_s)

    def _check_overdue(self) -> None:
        """A rollout past every limit of its own means a worker that hangs: no new work for it, and an end."""
        now = time.monotonic()
        for worker in list(self._workers):
            late = [key for key, running in worker.running.items() if now > running.overdue_at]
            for key in late:
                del worker.running[key]
                self._claimer.give_back()
                self._to_release[key] = LOST, "it ran past its time limit and the grading's"
                worker.cancel(key)
            if late and not worker.retiring:
                logger.warning("worker %d hangs in %s; it is replaced", worker.number, ", ".join(k[0] for k in late))
                worker.retiring = True
                self._fill_up()
            self._end_if_empty(worker)

    def _end_if_empty(self, worker: WorkerProcess) -> None:
        if worker.retiring and not worker.running:
            worker.end(grace_s=1)

    def _release_pending(self) -> None:
        for key, (reason, message) in list(self._to_release.items()):
            try:
                self._gateway.release(*key, reason, message)
                logger.info("%s attempt %d released: %s", *key, message)
            except GatewayError as error:
                if error.status not in (404, 409):
                    logger.warning("cannot release %s attempt %d yet: %s", *key, error)
                    return
                # Ended, cancelled, or a newer attempt: the gateway knows better.
            del self._to_release[key]

    def _reconcile(self) -> None:
        """Compare the gateway's running rollouts with those in our hands, both ways."""
        self._next_reconcile = time.monotonic() + self._reconcile_s
        try:
            running = self._gateway.list_rollouts(state=RolloutState.RUNNING, limit=10_000)
        except GatewayError as error:
            logger.warning("cannot compare with the gateway: %s", error)
            self._next_reconcile = time.monotonic() + 1
            return
        there = {(r.rollout_id, r.attempt) for r in running}
        here = {key: worker for worker in self._workers for key in worker.running}
        ours = (
            {key[0] for key in here} | set(self._claimer.claiming) | {job.rollout.rollout_id for job in self._backlog}
        )
        for key in there - here.keys():
            if key[0] not in ours:
                self._to_release[key] = LOST, "no worker holds it"
        for key in here.keys() - there:
            here[key].cancel(key)
        if not self._ready_for_work:
            # Leftovers of an earlier controller go first, so that a claim of ours is never mistaken for one of them.
            self._release_pending()
            self._ready_for_work = True
            self._claimer.start()

    def _collect_garbage(self) -> None:
        """Remove sandboxes whose worker died without taking them along."""
        for section in self._sections.values():
            try:
                make_backend(section).gc(self._label)
            except Exception as error:
                logger.warning("cannot remove left-over sandboxes: %s", error)


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
