"""The processes one run needs, brought up together: gateway, model server, controller.

`Stack` owns them through one supervisor. Secrets go by file: children read the signing key from the run directory and
mint what they need, so no token is ever in argv or in an environment.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from swe_lightning.controller.supervisor import Service, Supervisor, free_port, swel_command
from swe_lightning.errors import UpstreamError
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.gateway.database import URL_VARIABLE
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.policy.sync import ModelServer
from swe_lightning.rundir import RunDir

SYNC_RETRY_S = 120.0
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


class Stack:
    """Gateway + model server + controller of one run directory. Use as a context manager.

    `store`: URL of a PostgreSQL database for the gateway, without password; None = the run directory holds the store.
    """

    def __init__(
        self, run: RunDir, *, workers: int, concurrency: int, max_context: int, store: str | None = None
    ) -> None:
        self.run, self._store = run, store
        self._workers, self._concurrency, self._max_context = workers, concurrency, max_context
        self._exit = ExitStack()
        self._model_service: Service | None = None
        self._controller: Service | None = None
        self.version = 0
        run.logs.mkdir(parents=True, exist_ok=True)
        run.key_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.keyring = Keyring.load_or_create(run.key_file)

    def __enter__(self) -> Stack:
        try:
            self.supervisor = self._exit.enter_context(Supervisor())
            self._start_gateway()
            return self
        except BaseException:
            self._exit.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def serve_policy(self, model_dir: Path, *, version: int, threads: int = 1) -> None:
        """Serve a Hugging Face directory with the embedded engine and register it at the gateway."""
        self._model_dir, self.version = model_dir, version

        def command() -> list[str]:
            options = ["--port", str(self._model_port), "--threads", str(threads), "--version", str(self.version)]
            return swel_command(
                "serve", "model", str(self._model_dir), *options, "--max-context", f"{self._max_context}"
            )

        self._start_model(command)

    def serve_script(self, strategy: str, tokenizer_dir: Path | None) -> None:
        """Serve a scripted strategy in place of a policy (demonstrations, baselines, tests)."""

        def command() -> list[str]:
            tokenizer = ["--tokenizer", str(tokenizer_dir)] if tokenizer_dir else []
            return swel_command("serve", "script", strategy, "--port", str(self._model_port), *tokenizer)

        self._start_model(command)

    def start_controller(self, planned: Collection[str] | None = None) -> None:
        """Start executing queued rollouts, once; comes last, so that the first call finds a model.

        `planned`: what is wanted now. Anything else that an earlier process left open is cancelled first, because it
        was meant for other weights.
        """
        if self._controller is not None:
            return
        if planned is not None:
            self._cancel_others(planned)
        self._controller = self.supervisor.start(
            Service(
                "controller",
                lambda: swel_command(
                    "serve", "controller", str(self.run.path), "--gateway", self.gateway_url,
                    "--workers", str(self._workers), "--concurrency", str(self._concurrency),
                ),
                healthy=lambda: True,
                log=self.run.logs / "controller.log",
                environment={"OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip

    def sync(self, weights: Path, version: int) -> None:
        """Put new weights into the model server: pause, load, reset the prefix cache, resume; then register them.

        `weights` must be a complete Hugging Face directory, because a restarted server starts from it.
        """
        self._model_dir, self.version = weights, version
        try:
            self.model.sync(weights, version)
        except UpstreamError:
            # A server that died meanwhile is started again by the supervisor, from these very weights.
            self.model.wait_healthy(SYNC_RETRY_S)
            self.supervisor.check()
            self.model.sync(weights, version)
        self.gateway.register_model(self.model_url, version=version, max_context=self._max_context)

    def _cancel_others(self, planned: Collection[str]) -> None:
        wanted = set(planned)
        for state in ("queuing", "running"):
            while left := [r.rollout_id for r in self.gateway.list_rollouts(state=state) if r.rollout_id not in wanted]:
                self.gateway.cancel(left, "left over from a process that ended; meant for other weights")

    def _start_gateway(self) -> None:
        port = free_port()
        self.gateway_url = f"http://127.0.0.1:{port}"
        # the supervisor kills after ten seconds: the grace ends before that
        options = ["--port", str(port), "--grace-s", "5", *(["--store", self._store] if self._store else [])]
        self.supervisor.start(
            Service(
                "gateway",
                lambda: swel_command("serve", "gateway", str(self.run.path), *options),
                healthy=lambda: _answers(f"{self.gateway_url}/healthz"),
                log=self.run.logs / "gateway.log",
                environment={URL_VARIABLE: ""},  # the recipe says where the store is
            )
        )
        token = self.keyring.mint("control", ttl_s=30 * 86400)
        self.gateway = GatewayClient(self.gateway_url, token)

    def _start_model(self, command: Callable[[], list[str]]) -> None:
        """Start a model server in place of the one before, if any; the gateway knows only the new one."""
        if self._model_service is not None:
            self.supervisor.stop(self._model_service)
        self._model_port = free_port()
        self.model_url = f"http://127.0.0.1:{self._model_port}"
        self._model_service = self.supervisor.start(
            Service(
                "model server",
                command,
                healthy=lambda: _answers(f"{self.model_url}/health"),
                log=self.run.logs / "model.log",
                environment={"OMP_NUM_THREADS": "1"},
            )
        )
        self.model = ModelServer(self.model_url)
        for stale in self.gateway.models():
            self.gateway.delete_model(stale["url"])
        self.gateway.register_model(self.model_url, version=self.version, max_context=self._max_context)


def complete_model_dir(weights: Path, model_dir: Path) -> None:
    """Copy configuration and tokenizer of `model_dir` beside freshly exported weights."""
    for pattern in SMALL_FILES:
        for source in model_dir.glob(pattern):
            target = weights / source.name
            if not target.exists() and not source.name.endswith(".index.json"):
                shutil.copyfile(source, target)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Children listen on this machine: a proxy of the environment has no say."""


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
