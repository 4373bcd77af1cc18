"""Model calls as compact rows: token ids and log-probs as packed arrays, prompts as what they add to an earlier call.

A row names a `parent` (an earlier call of the same attempt) and how many leading prompt ids and messages it shares with
it; reading the rows of an attempt in order rebuilds every call exactly. The same rows travel to the client, so the wire
costs what the disk costs. Nothing is approximated: what cannot be packed is not accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.records import ModelCall
from swe_lightning.trajectory.prefix_tree import Delta

MIN_SHARED = 16
TIPS = 4
_BODY_FIELDS = ("protocol", "request", "response", "finish_reason", "sampling", "upstream", "retries", "reason")


def pack_ids(ids: np.ndarray) -> bytes:
    """Little-endian unsigned ids behind one byte that gives their width (2 or 4 bytes)."""
    wide = bool(ids.size) and int(ids.max()) > 0xFFFF
    return (b"\x04" + ids.astype("<u4").tobytes()) if wide else (b"\x02" + ids.astype("<u2").tobytes())


def unpack_ids(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<u4" if data[0] == 4 else "<u2", offset=1).astype(np.int32)


def pack_floats(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def unpack_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(a.size, b.size)
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


@dataclass(slots=True)
class Tip:
    """The end of a branch of an attempt's conversation: what the next call probably extends."""

    sequence: int
    ids: np.ndarray  # prompt + response
    prompt_size: int
    messages: list[Any]


class Encoder:
    """Turns the calls of one attempt into rows, remembering a few tips. Without tips a row just stands alone."""

    def __init__(self) -> None:
        self._tips: list[Tip] = []
        self._zstd = zstandard.ZstdCompressor(level=1)
        self._unzstd = zstandard.ZstdDecompressor()

    def encode(self, call: ModelCall) -> dict[str, Any]:
        """Columns of the row for `call`, whose `sequence` is already set."""
        prompt = np.asarray(call.prompt_ids, dtype=np.int32)
        response = np.asarray(call.response_ids, dtype=np.int32)
        tip, shared = self._parent(prompt)
        messages = call.request.get("messages")
        shared_messages = _common_items(tip.messages, messages) if tip and isinstance(messages, list) else 0
        request = call.request
        if shared_messages and isinstance(messages, list):
            request = {**request, "messages": messages[shared_messages:]}
        body = {name: getattr(call, name) for name in _BODY_FIELDS} | {"request": request}
        self._remember(tip, Tip(call.sequence, np.concatenate((prompt, response)), prompt.size, _list(messages)))
        return {
            "parent": tip.sequence if tip else None,
            "shared": shared,
            "shared_messages": shared_messages,
            "prompt": pack_ids(prompt[shared:]),
            "response": pack_ids(response),
            "logprobs": pack_floats(np.asarray(call.logprobs, dtype=np.float32)),
            "body": self._zstd.compress(dumps(body)),
        }

    def follow(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Take rows in that another encoder made. False if they build on a call that is not remembered here."""
        tips = {tip.sequence: tip for tip in self._tips}
        ids = {sequence: tip.ids for sequence, tip in tips.items()}
        messages = {sequence: tip.messages for sequence, tip in tips.items()}
        for row in rows:
            if row["parent"] is not None and row["parent"] not in ids:
                return False
            call = _rebuild(row, _prompt(row, ids), messages, self._unzstd)
            tip = Tip(call.sequence, ids[call.sequence], call.prompt_ids.size, messages[call.sequence])
            self._remember(tips.get(row["parent"]), tip)
            tips[tip.sequence] = tip
        return True

    def _remember(self, parent: Tip | None, tip: Tip) -> None:
        """A branch is remembered by its end; the branches that were extended last stay. A call whose prompt ids are
        missing is no conversation that another could extend."""
        kept = [known for known in self._tips if known is not parent]
        self._tips = [tip, *kept][:TIPS] if tip.prompt_size else kept

    def _parent(self, prompt: np.ndarray) -> tuple[Tip | None, int]:
        best, most = None, 0
        for tip in self._tips:
            shared = common_prefix(tip.ids, prompt)
            if shared > most:
                best, most = tip, shared
        return (best, most) if most >= MIN_SHARED else (None, 0)


def decode(rows: Iterable[Mapping[str, Any]], *, deltas: bool = False) -> Iterator[ModelCall]:
    """Rebuild calls from the rows of ONE attempt, ascending by sequence.

    `deltas`: prompts stay differences (trajectory's Delta), so that reading costs what is stored and not what it means.
    """
    zstd = zstandard.ZstdDecompressor()
    ids: dict[int, np.ndarray] = {}
    position: dict[int, int] = {}
    messages: dict[int, list[Any]] = {}
    for number, row in enumerate(rows):
        if deltas:
            position[row["sequence"]], parent = number, row["parent"]
            added = unpack_ids(row["prompt"]).astype("<i4").tobytes()
            prompt: Any = Delta(-1 if parent is None else position[parent], row["shared"], added)
        else:
            prompt = _prompt(row, ids)
        yield _rebuild(row, prompt, messages, zstd)


def _prompt(row: Mapping[str, Any], ids: dict[int, np.ndarray]) -> np.ndarray:
    """Prompt ids of a row whose parent is in `ids` (by sequence, prompt + response); enters the row there too."""
    rest, parent = unpack_ids(row["prompt"]), row["parent"]
    prompt = rest if parent is None else np.concatenate((ids[parent][: row["shared"]], rest))
    ids[row["sequence"]] = np.concatenate((prompt, unpack_ids(row["response"])))
    return prompt


def _rebuild(
    row: Mapping[str, Any], prompt: Any, messages: dict[int, list[Any]], zstd: zstandard.ZstdDecompressor
) -> ModelCall:
    """The call of a row whose parent's messages are in `messages` (by sequence); enters its own there too."""
    body = loads(zstd.decompress(row["body"]))
    request = body["request"]
    if row["shared_messages"]:
        request["messages"] = [*messages[row["parent"]][: row["shared_messages"]], *request["messages"]]
    messages[row["sequence"]] = _list(request.get("messages"))
    return ModelCall(
        rollout_id=row["rollout_id"],
        prompt_ids=prompt,
        response_ids=unpack_ids(row["response"]),
        logprobs=unpack_floats(row["logprobs"]),
        call_id=row["event_id"],
        attempt=row["attempt"],
        sequence=row["sequence"],
        version_start=row["version_start"],
        version_end=row["version_end"],
        started_at=row["started_at"],
        ended_at=row["at"],
        trainable=row["trainable"],
        **body,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def plain(call: ModelCall) -> dict[str, Any]:
    """A call as JSON for people and other programs: ids and log-probs as plain lists."""
    shown = dataclasses.asdict(call)
    return shown | {name: getattr(call, name).tolist() for name in ("prompt_ids", "response_ids", "logprobs")}


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see of a call without its ids: sizes, versions, effective sampling, reason."""
    body = loads(zstandard.ZstdDecompressor().decompress(row["body"]))
    sizes = {
        "prompt_tokens": row["shared"] + unpack_ids(row["prompt"]).size,
        "response_tokens": unpack_ids(row["response"]).size,
    }
    names = ("started_at", "version_start", "version_end", "trainable")
    kept = {"protocol": ""} | {name: body[name] for name in _BODY_FIELDS if name in body and name != "request"}
    return sizes | {name: row[name] for name in names} | kept


def _common_items(a: list[Any], b: list[Any]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
