"""A model server's reply as parsed JSON, with the long list of prompt ids as an array from the start.

A conversation of 30,000 tokens comes back as 30,000 numbers in every reply. Making a Python object of each costs more
than the rest of the call together, so the list is read straight from the bytes into int32, and the parser sees a place
holder. Whatever looks unusual (another layout, a number that is no id) goes through the ordinary parser, so the result
is never another one than there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from swe_lightning.gateway.jsonio import loads

_KEY = b'"prompt_token_ids":'
_HOLDS = -7  # no id, so it cannot be one that the server sent
_NOT_IDS = (b'"', b"-", b"+", b".")
_WORTH_IT = 4096
"""Bytes of a list below which the ordinary parser is as fast."""
_NONE = np.empty(0, np.int32)


class ReplyReader:
    """Parses replies, and remembers the last prompt of each conversation, within a budget of bytes.

    A conversation grows at its end, so of the next prompt only what is new is read; the rest is one comparison of
    bytes. What was forgotten is read in full.
    """

    def __init__(self, budget_bytes: int = 64 * 2**20) -> None:
        self._budget, self.held_bytes = budget_bytes, 0
        self._last: OrderedDict[str, tuple[bytes, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def forget(self, conversation: str) -> None:
        known = self._last.pop(conversation, None)
        if known is not None:
            self.held_bytes -= _size(known)

    def parse(self, raw: bytes, conversation: str) -> Any:
        """`loads(raw)`, except that a long list under `prompt_token_ids` (top level or first choice) is int32."""
        where = _place(raw)
        ids = self._ids(raw[where[0] + 1 : where[1] - 1], conversation) if where else None
        if where is None or ids is None:
            return loads(raw)
        reply = loads(b"%b[%d]%b" % (raw[: where[0]], _HOLDS, raw[where[1] :]))
        for holder in _holders(reply):
            if holder.get("prompt_token_ids") == [_HOLDS]:
                holder["prompt_token_ids"] = ids
                return reply
        return loads(raw)

    def _ids(self, text: bytes, conversation: str) -> np.ndarray | None:
        if text.endswith(b","):
            return None
        known = self._last.get(conversation)
        if known is not None and text.startswith(known[0]) and text[len(known[0]) : len(known[0]) + 1] in (b"", b","):
            rest = text[len(known[0]) + 1 :]
            more = _numbers(rest) if rest else _NONE
            ids = None if more is None else np.concatenate((known[1], more))
        else:
            ids = _numbers(text)
        if ids is not None:
            self._remember(conversation, text, ids)
        return ids

    def _remember(self, conversation: str, text: bytes, ids: np.ndarray) -> None:
        self.forget(conversation)
        self._last[conversation] = (text, ids)
        self.held_bytes += _size((text, ids))
        while self.held_bytes > self._budget and self._last:
            self.forget(next(iter(self._last)))


def _size(known: tuple[bytes, np.ndarray]) -> int:
    return len(known[0]) + known[1].nbytes


def _holders(reply: Any) -> list[dict[str, Any]]:
    if not isinstance(reply, dict):
        return []
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return [reply, first] if isinstance(first, dict) else [reply]


def _place(raw: bytes) -> tuple[int, int] | None:
    """Where the only list of prompt ids lies in `raw`, brackets included; None if it is short or that is not certain.

    A quote inside a JSON string is always escaped, so the key's closing quote cannot be found inside one.
    """
    at = raw.find(_KEY)
    start = at + len(_KEY)
    start += raw[start : start + 1] == b" "
    if at < 1 or raw[at - 1 : at] == b"\\" or raw[start : start + 1] != b"[" or raw.find(_KEY, start) != -1:
        return None
    end = raw.find(b"]", start) + 1
    return (start, end) if end - start >= _WORTH_IT else None


def _numbers(text: bytes) -> np.ndarray | None:
    """Comma-separated ids as int32; None for anything else."""
    data = np.frombuffer(text, dtype=np.uint8)
    if data.max() > ord("9") or any(sign in text for sign in _NOT_IDS):
        return None
    try:
        ids = np.fromstring(text, dtype=np.int64, sep=",")  # too large a number saturates
    except ValueError:
        return None
    return ids.astype(np.int32) if ids.max() <= 0x7FFFFFFF else None
