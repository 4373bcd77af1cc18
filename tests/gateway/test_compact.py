"""Compact rows: exact for any history, small for a growing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.gateway import compact
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import rows_of

ids = st.lists(st.integers(0, 200_000), max_size=40)


def row(call: ModelCall, encoder: compact.Encoder) -> dict[str, Any]:
    fixed = {"rollout_id": "r", "attempt": 1, "event_id": call.call_id, "version_start": 0, "version_end": 0}
    fixed |= {"sequence": call.sequence, "started_at": 0.0, "at": 0.0, "trainable": True}
    return fixed | encoder.encode(call)


def message(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@st.composite
def histories(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that extend, branch from, cut or ignore earlier calls."""
    calls: list[ModelCall] = []
    for sequence in range(1, draw(st.integers(1, 8)) + 1):
        start: list[int] = []
        messages: list[Any] = []
        if calls and draw(st.booleans()):
            base = draw(st.sampled_from(calls))
            whole = [*base.prompt_ids, *base.response_ids]
            start = whole[: draw(st.integers(0, len(whole)))]
            messages = base.request["messages"][: draw(st.integers(0, len(base.request["messages"])))]
        elif draw(st.booleans()):
            start = list(range(30))
        response = draw(ids)
        request = {"messages": [*messages, message(draw(st.integers(0, 3)))], "model": "m"}
        calls.append(
            ModelCall("r", [*start, *draw(ids)], response, [-0.25] * len(response), sequence=sequence, request=request)
        )
    return calls


@given(histories())
def test_every_history_is_rebuilt_exactly(calls: list[ModelCall]) -> None:
    encoder = compact.Encoder()
    rebuilt = list(compact.decode([row(call, encoder) for call in calls]))
    for before, after in zip(calls, rebuilt, strict=True):
        assert after.prompt_ids.tolist() == list(before.prompt_ids)
        assert after.response_ids.tolist() == before.response_ids
        assert after.logprobs.tolist() == before.logprobs
        assert after.request == before.request
        assert after.sequence == before.sequence


@given(histories())
def test_rows_come_out_the_same_from_prompts_that_stay_differences(calls: list[ModelCall]) -> None:
    encoder = compact.Encoder()
    stored = [row(call, encoder) for call in calls]
    deltas = list(compact.decode(stored, deltas=True))
    assert [len(c.prompt_ids) for c in deltas] == [len(c.prompt_ids) for c in calls]
    whole, lean = rows_of(list(compact.decode(stored))), rows_of(deltas)
    lean.check()
    assert [(r.ids.tolist(), r.mask.tolist(), r.logprobs.tolist(), r.spans) for r in lean.rows] == [
        (r.ids.tolist(), r.mask.tolist(), r.logprobs.tolist(), r.spans) for r in whole.rows
    ]
    assert (lean.counts, lean.dropped) == (whole.counts, whole.dropped)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_pack(values: list[int]) -> None:
    assert compact.unpack_ids(compact.pack_ids(np.array(values, np.int32))).tolist() == values


def test_a_fresh_encoder_continues_an_attempt() -> None:
    """After a restart there are no tips; rows then stand alone and the history is still whole."""
    prompt = list(range(100))
    first = ModelCall("r", prompt, [7, 8], [-1.0, -1.0], sequence=1, request={"messages": [message("a")]})
    later = ModelCall("r", [*prompt, 7, 8, 9], [1], [-1.0], sequence=2, request={"messages": [message("b")]})
    rows = [row(first, compact.Encoder()), row(later, compact.Encoder())]
    assert rows[1]["parent"] is None
    assert [c.prompt_ids.size for c in compact.decode(rows)] == [100, 103]


def test_ids_are_as_wide_as_the_largest_needs() -> None:
    assert [len(compact.pack_ids(np.array(ids, np.int32))) for ids in ([65535], [65536], [1, 65536])] == [3, 5, 9]
    assert compact.unpack_ids(compact.pack_ids(np.array([65536], np.int32))).tolist() == [65536]


def parents(*prompts: list[int]) -> list[int | None]:
    """Parent of each call (numbered from 0), none of which sampled anything."""
    encoder = compact.Encoder()
    return [row(ModelCall("r", p, [], [], sequence=i), encoder)["parent"] for i, p in enumerate(prompts)]


def test_what_a_call_builds_on() -> None:
    a, b = list(range(100)), list(range(500, 600))
    others = [list(range(n, n + 20)) for n in range(1000, 6000, 1000)]
    for shared, found in ((15, None), (16, 0)):
        assert parents(a, a[:shared] + b)[1] == found
    grown = [a + list(range(700, 700 + n)) for n in range(1, 11)]
    assert parents(a, b, *grown, [*b, 1])[-1] == 1, "a branch that grows is remembered by its end only"
    assert parents(a, *others, [*a, 1])[-1] is None, "four branches are remembered"
    assert parents(a, *others, [*others[-1], 1])[-1] == 5, "those that came last"
    assert parents(a, *[[]] * 5, [*a, 1])[-1] == 0, "calls without prompt ids push nothing out"


def test_rows_that_build_on_a_forgotten_call_are_not_followed() -> None:
    """Whoever reads on from where it was has to read all of them again then."""
    encoder = compact.Encoder()
    made = [row(ModelCall("r", list(range(20 + n)), [], [], sequence=n), encoder) for n in range(3)]
    late = compact.Encoder()
    assert not late.follow(made[1:])
    late = compact.Encoder()
    assert late.follow(made[:1])
    assert late.follow(made[1:])
    assert row(ModelCall("r", list(range(30)), [], [], sequence=3), late)["parent"] == 2


def test_a_long_conversation_costs_a_twentieth_of_its_json() -> None:
    rng = np.random.default_rng(0)
    prompt, messages, raw, stored = rng.integers(0, 150_000, 1500).tolist(), [message("task " * 900)], 0, 0
    encoder = compact.Encoder()
    for sequence in range(1, 51):
        response = rng.integers(0, 150_000, 60).tolist()
        call = ModelCall("r", prompt, response, [-0.5] * 60, sequence=sequence, request={"messages": messages})
        encoded = encoder.encode(call)
        stored += sum(len(v) for v in encoded.values() if isinstance(v, bytes))
        raw += len(orjson.dumps([messages, prompt, response, call.logprobs]))
        prompt = [*prompt, *response, *rng.integers(0, 150_000, 120).tolist()]
        messages = [*messages, message(f"answer {sequence} " * 8), message(f"output {sequence} " * 30)]
    assert stored * 20 < raw
