"""Frames between a box and its owner: a length, then fields with a length each. Bytes in, bytes out, no types.

Both sides know the order of a request's fields; neither evaluates what the other sends.
"""

from struct import pack as _pack
from struct import unpack_from as _unpack_from

OK, FAILED = b"+", b"-"


def fields_of(*fields: bytes) -> bytes:
    return b"".join(_pack("!I", len(f)) + f for f in fields)


def pack(*fields: bytes) -> bytes:
    """One frame: total length, then each field with its length."""
    body = fields_of(*fields)
    return _pack("!I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The fields of a frame's body."""
    fields, at = [], 0
    while at < len(body):
        (n,) = _unpack_from("!I", body, at)
        fields.append(body[at + 4 : at + 4 + n])
        at += 4 + n
    return fields


def mapping(body: bytes) -> dict[bytes, bytes]:
    """Fields that alternate key and value."""
    fields = unpack(body)
    return dict(zip(fields[::2], fields[1::2], strict=True))


def over(base: dict[bytes, bytes], more: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """`more` over `base`. A PATH goes in front of the one that is there, never in its place: whoever gives one does not
    know where a box has its Python."""
    both = {**base, **more}
    if b"PATH" in base and b"PATH" in more:
        first = more[b"PATH"].split(b":")
        both[b"PATH"] = b":".join(first + [p for p in base[b"PATH"].split(b":") if p not in first])
    return both
