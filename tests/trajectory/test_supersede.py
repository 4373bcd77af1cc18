"""Retries leave, deliberate samples stay."""

from __future__ import annotations

from dataclasses import replace

from swe_lightning.records import ModelCall
from swe_lightning.trajectory import merge, rows_of, supersede


def call(prompt, reply, start=0.0, end=0.0, **more) -> ModelCall:
    return ModelCall("r", prompt, reply, [-0.5] * len(reply), started_at=start, ended_at=end, **more)


def marks(calls: list[ModelCall]) -> list[bool]:
    return [c.superseded for c in supersede(calls)]


def test_same_request_after_the_reply_ended_is_a_retry() -> None:
    calls = [call([1], [2], 0.5, 1), call([1], [3], 2, 3), call([1, 3, 4], [5], 4, 5)]
    assert marks(calls) == [True, False, False]
    report = rows_of(calls)
    assert [(r.ids.tolist(), r.mask.tolist()) for r in report.rows] == [([1, 3, 4, 5], [0, 1, 0, 1])]
    assert report.dropped == {"call:superseded": 1}
    report.check()


def test_switch_keeps_every_reply() -> None:
    calls = [call([1], [2], 0.5, 1), call([1], [3], 2, 3)]
    assert len(rows_of(calls, duplicate_calls="keep").rows) == 2
    assert len(rows_of(calls, duplicate_calls="supersede").rows) == 1


def test_overlapping_identical_calls_are_samples() -> None:
    assert marks([call([1], [2], 0.5, 2), call([1], [3], 1, 3)]) == [False, False]


def test_a_continued_reply_stays() -> None:
    calls = [call([1], [2], 0.5, 1), call([1], [3], 2, 3), call([1, 2, 8], [4], 4, 5), call([1, 3, 8], [4], 6, 7)]
    assert marks(calls) == [False] * 4


def test_only_the_last_of_a_chain_of_retries_stays() -> None:
    assert marks([call([1], [i], 2 * i + 1, 2 * i + 2) for i in range(3)]) == [True, True, False]


def test_equal_replies_count_for_the_newer_call() -> None:
    calls = [call([1], [2], 0.5, 1), call([1], [2], 2, 3), call([1, 2, 8], [4], 4, 5)]
    assert marks(calls) == [True, False, False]
    assert sum(r.trained_tokens for r in rows_of(calls).rows) == 2


def test_other_sampling_request_is_not_a_retry() -> None:
    calls = [call([1], [2], 0.5, 1, request={"max_tokens": 5}), call([1], [3], 2, 3, request={"max_tokens": 9})]
    assert marks(calls) == [False, False]


def test_a_retry_that_failed_upstream_is_a_retry() -> None:
    asked, failed = {"messages": ["a"]}, {"trainable": False, "reason": "upstream_error"}
    calls = [call([1], [2], 0.5, 1, request=asked), call([], [], 2, 3, request=asked, **failed)]
    assert marks(calls) == [True, False]
    report = rows_of(calls)
    assert report.rows == []
    assert report.dropped == {"call:superseded": 1, "call:upstream_error": 1, "rollout:no_trainable_calls": 1}
    calls = [call([1], [2], 0.5, 1, request=asked), call([], [], 2, 3, request={"messages": ["b"]}, **failed)]
    assert marks(calls) == [False, False]


def test_without_times_nothing_is_proven() -> None:
    assert marks([call([1], [2]), call([1], [3])]) == [False, False]


def test_attempts_and_rollouts_are_apart() -> None:
    first = call([1], [2], 0.5, 1)
    assert marks([first, replace(call([1], [3], 2, 3), attempt=2)]) == [False, False]
    assert marks([first, replace(call([1], [3], 2, 3), rollout_id="s")]) == [False, False]


def test_continuation_by_text_when_the_template_rewrote_the_ids() -> None:
    asked = {"messages": [{"role": "user", "content": "q"}]}
    said = {"choices": [{"message": {"role": "assistant", "content": "a"}}]}
    went_on = {
        "messages": [*asked["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "o"}]
    }
    calls = [
        call([1], [20, 2], 0.5, 1, request=asked, response=said),
        call([1], [3], 2, 3, request=asked),
        call([1, 2, 9], [4], 4, 5, request=went_on),
    ]
    assert marks(calls) == [False, False, False]


def test_a_marked_call_is_kept_but_never_trained() -> None:
    calls = [call([1], [2], superseded=True), call([1], [3])]
    assert supersede(calls)[0].superseded
    assert [r.ids.tolist() for r in merge(calls)] == [[1, 3]]
