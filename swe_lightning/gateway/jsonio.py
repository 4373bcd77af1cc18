"""JSON of the model protocol: orjson, and the standard library for the rare text orjson refuses.

Byte-level models can emit lone surrogates and clients can send integers beyond 64 bits; both are legal in a request and
must not turn into an error of ours.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def loads(data: bytes) -> Any:
    """Parsed JSON; ValueError if it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data, parse_constant=_refuse)


def dumps(value: Any, *, sort_keys: bool = False) -> bytes:
    try:
        return orjson.dumps(value, option=_NUMPY | (orjson.OPT_SORT_KEYS if sort_keys else 0))
    except TypeError:  # orjson.JSONEncodeError is one
        return json.dumps(value, separators=(",", ":"), allow_nan=False, sort_keys=sort_keys).encode()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
