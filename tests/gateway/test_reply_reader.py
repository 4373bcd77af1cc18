"""A long list of prompt ids read from the bytes: the same as the parser says, whatever the bytes are."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from swe_lightning.gateway.jsonio import loads
from swe_lightning.gateway.reply_reader import ReplyReader

LONG = list(range(100_000, 102_000))


def plain(value: object) -> object:
    """The parsed reply with lists for arrays."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


@pytest.mark.parametrize("place", ["top", "choice"])
def test_a_growing_prompt_is_read_once(place: str) -> None:
    reader = ReplyReader()
    ids: list[int] = []
    for turn in range(5):
        ids = [*ids, *LONG, turn]
        reply: dict[str, object] = {"prompt_token_ids": ids, "choices": [{"token_ids": [1]}]}
        if place == "choice":
            reply = {"choices": [{"prompt_token_ids": ids, "token_ids": [1]}], "usage": None}
        parsed = reader.parse(orjson.dumps(reply), "r")
        assert plain(parsed) == reply
        found = parsed["prompt_token_ids"] if place == "top" else parsed["choices"][0]["prompt_token_ids"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.int32


def test_conversations_do_not_mix_and_a_prefix_ends_at_a_comma() -> None:
    reader = ReplyReader()
    one, other = [*LONG, 12], [*LONG, 123]
    for ids, name in ((one, "a"), (other, "a"), (one, "b"), (LONG, "a"), ([*LONG[1:], 5], "a")):
        assert plain(reader.parse(orjson.dumps({"prompt_token_ids": ids}), name)) == {"prompt_token_ids": ids}


NUMBERS = b",".join(b"%d" % i for i in LONG)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt_token_ids":[' + NUMBERS + b",1.5]}",
        b'{"prompt_token_ids":[' + NUMBERS + b",-3]}",
        b'{"prompt_token_ids":[' + NUMBERS + b',"7"]}',
        b'{"prompt_token_ids":[' + NUMBERS + b",4294967296]}",
        b'{"prompt_token_ids":[' + NUMBERS + b",99999999999999999999999999]}",
        b'{"prompt_token_ids":[' + NUMBERS + b",true]}",
        b'{"prompt_token_ids":[' + NUMBERS + b",[1]]}",
        b'{"prompt_token_ids": [' + NUMBERS.replace(b",", b", ") + b"]}",
        b'{"elsewhere":{"prompt_token_ids":[' + NUMBERS + b"]}}",
        b'{"prompt_token_ids":[' + NUMBERS + b'],"choices":[{"prompt_token_ids":[' + NUMBERS + b"]}]}",
        orjson.dumps({"text": '{"prompt_token_ids":[' + NUMBERS.decode() + "]}"}),
        orjson.dumps({'x"prompt_token_ids': LONG}),
        b"[1]",
        b'{"prompt_token_ids":[]}',
    ],
)
def test_unusual_bytes_mean_what_the_parser_says(raw: bytes) -> None:
    reader = ReplyReader()
    for _ in range(2):
        assert plain(reader.parse(raw, "r")) == loads(raw)


@pytest.mark.parametrize("tail", [b",]}", b",,1]}", b" 1]}", b"]", b"", b",1x]}", b",+1]}"])
def test_what_is_no_json_stays_an_error(tail: bytes) -> None:
    reader = ReplyReader()
    reader.parse(b'{"prompt_token_ids":[' + NUMBERS + b"]}", "r")
    with pytest.raises(ValueError, match=r"Expecting|delimiter|Extra"):
        reader.parse(b'{"prompt_token_ids":[' + NUMBERS + tail, "r")


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_prompts(seed: int) -> None:
    """Extended, cut back, changed in the middle, replaced: numbers of one to ten digits."""
    random, reader = np.random.default_rng(seed), ReplyReader()
    ids: list[int] = []
    for _ in range(12):
        keep = int(random.choice([len(ids), len(ids), len(ids) // 2, 0]))
        fresh = 10 ** random.uniform(0, 9.33, size=int(random.integers(1, 1500)))
        ids = [*ids[:keep], *fresh.astype(np.int64).clip(0, 2**31 - 1).tolist()]
        assert plain(reader.parse(orjson.dumps({"prompt_token_ids": ids}), "r")) == {"prompt_token_ids": ids}


def test_memory_has_a_budget() -> None:
    reader = ReplyReader(budget_bytes=200_000)
    raw = orjson.dumps({"prompt_token_ids": LONG})
    for n in range(50):
        reader.parse(raw, f"r{n}")
    assert 2 <= len(reader) <= 9
    for n in range(50):
        reader.forget(f"r{n}")
    assert (len(reader), reader.held_bytes) == (0, 0)
