"""Long polls that wake on commits: nobody asks the store again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

MAX_WAIT_S = 60.0


class Changes:
    """Wakes long polls after commits that changed a rollout."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def bind(self) -> None:
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        """From any thread."""
        self.in_loop(self._wake)

    def tasks(self) -> int:
        """Tasks of the event loop, from any thread."""
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0

    def in_loop(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run `action` in the event loop, from any thread; nothing happens once the loop is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, *arguments)

    def close(self) -> None:
        """Every poll answers now, with what there is."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def poll(self, query: Callable[[], Any], enough: Callable[[Any], bool], wait_s: float) -> Any:
        """The first result that is enough, or what there is after `wait_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MAX_WAIT_S)
        while True:
            event = self._event  # taken before the query: a change after it is not missed
            result = await run_in_threadpool(query)
            left = deadline - loop.time()
            if enough(result) or left <= 0 or self._closed:
                return result
            try:
                async with asyncio.timeout(left):
                    await event.wait()
            except TimeoutError:
                continue
