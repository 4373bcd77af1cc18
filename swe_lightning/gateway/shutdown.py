"""How a gateway stops: nothing new, a while for what is in flight, then a typed answer for the rest.

On SIGTERM or SIGINT /healthz turns 503 and every call that waits or arrives gets 503 `shutting_down` with Retry-After,
which a client that retries survives; calls at a model server may finish within `grace_s`, and after it they get the
same answer. Only then are connections closed. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from typing import Any

import uvicorn

from swe_lightning.gateway.app import Gateway
from swe_lightning.gateway.connections import Connection

log = logging.getLogger("swel.gateway")
LAST_ANSWERS_S = 3


class Server(uvicorn.Server):
    """uvicorn with an orderly end of the gateway before its own."""

    def __init__(self, gateway: Gateway, *, grace_s: float) -> None:
        self._gateway, self._grace_s = gateway, grace_s
        application: Any = gateway
        super().__init__(
            uvicorn.Config(
                application,
                access_log=False,
                log_config=None,
                log_level="error",  # below it are lines that a client can make uvicorn say without end
                http=Connection,
                lifespan="on",
                timeout_graceful_shutdown=LAST_ANSWERS_S,
                timeout_keep_alive=75,
                ws="none",
                proxy_headers=False,
                server_header=False,
                date_header=False,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """What exists now stays: the collector need not walk through it again and again, nor after every few calls
        (each makes hundreds of small objects that die with it)."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gate = self._gateway.gate
        log.info("stopping", extra={"in_flight": gate.in_flight, "waiting": gate.waiting, "grace_s": self._grace_s})
        self._gateway.stopping()
        deadline = asyncio.get_running_loop().time() + self._grace_s
        while gate.in_flight and not self.force_exit and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if gate.in_flight:
            log.warning("calls cut off", extra={"in_flight": gate.in_flight})
            await self._gateway.upstreams.stop()
        await super().shutdown(sockets)
