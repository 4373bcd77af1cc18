"""Random conversations: the prefix tree agrees with comparing everything; every sampled token trains once."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_lightning.records import ModelCall
from swe_lightning.trajectory import merge, rows_of
from swe_lightning.trajectory.prefix_tree import ID, Delta, path_ids, place_calls

ids = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def conversations(draw) -> list[ModelCall]:
    """Calls whose prompts start with any piece of any earlier call: continuations, rollbacks, rewrites, sub-agents."""
    calls: list[ModelCall] = []
    for i in range(draw(st.integers(1, 9))):
        seen: list[int] = []
        if calls and draw(st.integers(0, 4)):
            base = draw(st.sampled_from(calls))
            seen = [*base.prompt_ids, *base.response_ids]
            if not draw(st.integers(0, 2)):
                seen = seen[: draw(st.integers(0, len(seen)))]
        prompt = [*seen, *draw(ids)] or [0]
        response = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        calls.append(ModelCall("r", prompt, response, [-1.0 - i] * len(response), sequence=i))
    return calls


def reference(calls: list[ModelCall]) -> list[tuple[list[int], list[int], list[int]]]:
    """The rule, word by word, comparing everything with everything."""
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for call in calls:
        fits = [row for row in rows if call.prompt_ids[: len(row[0])] == row[0]]
        if fits:
            row = max(fits, key=lambda r: len(r[0]))
        else:
            row = ([], [], [])
            rows.append(row)
        bridge = call.prompt_ids[len(row[0]) :]
        row[0].extend([*bridge, *call.response_ids])
        row[1].extend([0] * len(bridge) + [1] * len(call.response_ids))
        row[2].append(call.sequence)
    return rows


def random_conversation(rng: random.Random) -> list[ModelCall]:
    """The same kind of conversation from a seed: quick enough for thousands, without shrinking."""
    calls: list[ModelCall] = []
    for i in range(rng.randint(1, 14)):
        seen: list[int] = []
        if calls and rng.random() < 0.85:
            base = rng.choice(calls[-4:])
            seen = [*base.prompt_ids, *base.response_ids]
            if rng.random() < 0.25:
                seen = seen[: rng.randint(0, len(seen))]
        prompt = [*seen, *(rng.randint(0, 2) for _ in range(rng.randint(0, 3)))] or [0]
        response = [rng.randint(0, 2) for _ in range(rng.randint(1, 3))]
        calls.append(ModelCall("r", prompt, response, [-1.0 - i] * len(response), sequence=i))
    return calls


def test_tree_agrees_with_comparing_everything_thousands_of_times() -> None:
    rng = random.Random(0)
    for _ in range(1500):
        calls = random_conversation(rng)
        report = rows_of(calls, duplicate_calls="keep")
        report.check()
        mine = sorted((r.ids.tolist(), r.mask.tolist()) for r in report.rows)
        assert mine == sorted((a, b) for a, b, _ in reference(calls))


@settings(max_examples=150)
@given(conversations())
def test_tree_agrees_with_comparing_everything(calls: list[ModelCall]) -> None:
    mine = sorted((r.ids.tolist(), r.mask.tolist()) for r in merge(calls))
    assert mine == sorted((a, b) for a, b, _ in reference(calls))


@settings(max_examples=150)
@given(conversations(), st.sets(st.integers(0, 8)))
def test_token_truth(calls: list[ModelCall], broken: set[int]) -> None:
    """Every token of every usable call trains exactly once, with its own id and log-prob; nothing else trains."""
    for i in broken & set(range(len(calls))):
        calls[i].trainable = False
    report = rows_of(calls, duplicate_calls="keep")
    report.check()
    trained = Counter(
        (int(i), float(p)) for r in report.rows for i, m, p in zip(r.ids, r.mask, r.logprobs, strict=True) if m
    )
    usable = [c for c in calls if c.trainable]
    assert trained == Counter((i, p) for c in usable for i, p in zip(c.response_ids, c.logprobs, strict=True))
    for row in report.rows:
        for sequence, (start, end, _) in zip(row.calls, row.spans, strict=True):
            assert row.ids[:start].tolist() == calls[sequence].prompt_ids
            assert row.ids[start:end].tolist() == calls[sequence].response_ids


@settings(max_examples=150)
@given(conversations(), st.data())
def test_prompts_as_differences_give_the_same_rows(calls: list[ModelCall], data) -> None:
    short = [_as_delta(calls, i, data.draw(st.integers(-1, i - 1))) for i in range(len(calls))]
    full = [np.frombuffer(path_ids(p.prompt), ID).tolist() for p in place_calls(short) if p]
    assert full == [c.prompt_ids for c in calls]
    assert [_plain(r) for r in merge(short)] == [_plain(r) for r in merge(calls)]


def _as_delta(calls: list[ModelCall], i: int, base: int) -> ModelCall:
    call, shared = calls[i], 0
    if base >= 0:
        known = [*calls[base].prompt_ids, *calls[base].response_ids]
        while shared < min(len(known), len(call.prompt_ids)) and known[shared] == call.prompt_ids[shared]:
            shared += 1
    tail = np.array(call.prompt_ids[shared:], dtype=ID).tobytes()
    return ModelCall("r", Delta(base, shared, tail), call.response_ids, call.logprobs, sequence=i)


def _plain(row) -> tuple:
    return row.ids.tolist(), row.mask.tolist(), row.logprobs.tolist(), row.spans, row.calls


def test_room_imports_without_torch() -> None:
    code = "import sys, swe_lightning.trajectory, swe_lightning.objective; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
