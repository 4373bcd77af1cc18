"""One connection to the gateway, with the bounds that uvicorn leaves open: how long and how large a request may be.

A request has to arrive in whole, head and body, within REQUEST_S, and its head (request line and headers) within
HEAD_BYTES; else the connection is closed. So an agent that opens connections and says nothing, little, or without end
keeps nobody else from being served for longer. The size of bodies is bounded where they are read (routes.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_S = 60.0
HEAD_BYTES = 2**16


class Connection(HttpToolsProtocol):
    """uvicorn's, with a deadline for what comes in."""

    request_s = REQUEST_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._due: asyncio.TimerHandle | None = None
        """While a request is on its way in."""
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(self.request_s, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._due is None:
            self._due = self.loop.call_later(self.request_s, self._too_late)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def _arrived(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_late(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if answering or self.pipeline:  # the request before this one; the next is not read before its answer is out
            self._due = self.loop.call_later(self.request_s, self._too_late)
        else:
            self.transport.close()
