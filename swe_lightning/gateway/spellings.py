"""Tool arguments as the model wrote them, for protocols that carry them as JSON values.

Anthropic clients replay a tool's input as an object; only the text the model sampled makes the next prompt continue
the last one. It is kept per attempt and read from the store's calls when this process has not seen them (a restart).
Losing an entry would cost a row, never a wrong token: the merge goes by ids.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from swe_lightning.gateway import compact
from swe_lightning.gateway.protocols.base import calls_of, message_of
from swe_lightning.gateway.store import Store

_ATTEMPTS = 4096


class Spellings:
    """Texts by tool call id, for the attempts asked of last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, int], dict[str, list[str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def forget(self, rollout_id: str, attempt: int) -> None:
        """The attempt has ended."""
        self._known.pop((rollout_id, attempt), None)

    async def of(self, rollout_id: str, attempt: int) -> dict[str, list[str]]:
        key = (rollout_id, attempt)
        if key not in self._known:
            found = await asyncio.to_thread(self._read, rollout_id, attempt)
            self._known.setdefault(key, found)
        self._known.move_to_end(key)
        while len(self._known) > _ATTEMPTS:
            self._known.popitem(last=False)
        return self._known[key]

    def note(self, rollout_id: str, attempt: int, reply: dict[str, Any]) -> None:
        """Keep what the reply to a call of a known attempt says; of an unknown one the store knows it."""
        known = self._known.get((rollout_id, attempt))
        if known is not None:
            _note(known, reply)

    def _read(self, rollout_id: str, attempt: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for call in compact.decode(self._store.call_rows(rollout_id, attempt)):
            if isinstance(call.response.get("choices"), list) and call.response["choices"]:
                _note(found, call.response)
        return found


def _note(known: dict[str, list[str]], reply: dict[str, Any]) -> None:
    for call_id, _, written in calls_of(message_of(reply), str(reply.get("id") or "reply")):
        known.setdefault(call_id, []).append(written)
