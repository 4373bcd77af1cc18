"""What is not trained has a reason, and the counts add up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from swe_lightning.records import ModelCall, Untrainable
from swe_lightning.trajectory import RowsReport, merge, rows_of
from swe_lightning.trajectory.commands import show, show_text, stats, stats_text
from swe_lightning.trajectory.report import why_no_rows


def call(prompt, response, logprobs=None, **more) -> ModelCall:
    return ModelCall("r", prompt, response, [-0.5] * len(response) if logprobs is None else logprobs, **more)


def test_token_without_logprob_was_not_sampled() -> None:
    (row,) = merge([call([1], [7, 99], [-0.25, None])])
    assert row.mask.tolist() == [0, 1, 0]
    assert row.logprobs.tolist() == [0.0, -0.25, 0.0]
    report = rows_of([call([1], [7, 99], [-0.25, float("nan")])])
    assert report.stats["tokens_without_logprob"] == 1
    report.check()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (call(None, [7], [-1.0]), Untrainable.NO_PROMPT_IDS),
        (call([], [7], [-1.0]), Untrainable.NO_PROMPT_IDS),
        (call([1, 2, 3], [], []), Untrainable.NO_RESPONSE_IDS),
        (call([1, 2, 3], [4, 5, 6], [-1.0, -1.0]), Untrainable.LOGPROB_LEN_MISMATCH),
        (call([1, 2, 3], [4], trainable=False, reason="token_loss"), Untrainable.TOKEN_LOSS),
        (call([1, None, 3], [4]), Untrainable.NO_PROMPT_IDS),
    ],
)
def test_a_bad_call_leaves_alone(bad: ModelCall, reason: str) -> None:
    calls = [call([1], [2]), replace(bad, sequence=1), call([1, 2, 3, 4, 5], [6], sequence=2)]
    report = rows_of(calls)
    (row,) = report.rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [0, 1, 0, 0, 0, 1]
    assert row.calls == [0, 2]
    assert report.dropped == {f"call:{reason}": 1}
    report.check()


def test_no_calls_is_a_reason() -> None:
    report = rows_of([])
    assert report.rows == []
    assert report.dropped == {"rollout:no_model_calls": 1}
    report.check()


def test_rollout_without_usable_calls_is_a_reason() -> None:
    report = rows_of([call([], [1])])
    assert report.dropped == {"call:no_prompt_ids": 1, "rollout:no_trainable_calls": 1}
    report.check()


def test_message_of_an_empty_step_names_every_reason() -> None:
    dropped = Counter({"rollout:no_trainable_calls": 2, "call:no_response_ids": 2, "infra:upstream_error": 1})
    assert why_no_rows(dropped, 3) == (
        "no training rows from 3 rollouts, mostly call:no_response_ids: 2 x call:no_response_ids, "
        "2 x rollout:no_trainable_calls, 1 x infra:upstream_error"
    )
    assert why_no_rows({}) == "no training rows: no rollout was collected"


def test_calls_of_a_lost_attempt_are_counted_not_trained() -> None:
    report = rows_of([call([1], [2], attempt=1), call([1], [3], attempt=2), call([1, 2, 4], [5], attempt=1)])
    assert [r.ids.tolist() for r in report.rows] == [[1, 3]]
    assert report.dropped == {"call:earlier_attempt": 2}
    report.check()


def test_rollouts_are_never_merged_with_each_other() -> None:
    calls = [call([1], [2]), replace(call([1, 2, 3], [4]), rollout_id="s")]
    assert [(r.rollout_id, r.ids.tolist()) for r in merge(calls)] == [("r", [1, 2]), ("s", [1, 2, 3, 4])]
    report = rows_of(calls)
    assert report.stats["rollouts"] == 2
    assert report.stats["single_row_share"] == 1.0


def test_stats_of_several_rollouts_add() -> None:
    total = RowsReport()
    total += rows_of([call([1], [5, 6, 7]), call([1, 7, 8], [9], sequence=1)])
    total += rows_of([call([1], [2]), call([1, 2, 3], [4], sequence=1)])
    total.check()
    assert total.stats["rows_per_rollout"] == 1.5
    assert total.stats["single_row_share"] == 0.5
    assert total.stats["merge_rate"] == 0.5
    assert total.stats["breaks_template_rewrote_history"] == 1


def test_a_template_that_breaks_every_turn_has_merge_rate_zero() -> None:
    report = rows_of([call([1], [5, 6, 7]), call([1, 7, 8], [9], sequence=1)])
    assert report.stats["merge_rate"] == 0.0
    assert report.stats["duplicated_tokens"] == 1


def test_ledger_check_finds_a_lost_call() -> None:
    report = rows_of([call([1], [2])])
    report.counts["calls"] += 1
    with pytest.raises(ValueError, match="do not add up"):
        report.check()


def test_sequence_number_decides_the_order() -> None:
    calls = [call([1, 2, 3], [4], sequence=1), call([1], [2], sequence=0)]
    assert [r.ids.tolist() for r in merge(calls)] == [[1, 2, 3, 4]]


def test_spans_carry_weight_versions() -> None:
    (row,) = merge([call([1], [2], version_start=3), call([1, 2, 9], [4, 5], sequence=1, version_start=4)])
    assert row.spans == [(1, 2, 3), (3, 5, 4)]


def test_arrays_and_lists_give_the_same_rows() -> None:
    lists = [call([1, 70000], [2]), call([1, 70000, 2, 3], [4], sequence=1)]
    arrays = [
        replace(
            c,
            prompt_ids=np.array(c.prompt_ids),
            response_ids=np.array(c.response_ids, dtype=np.uint32),
            logprobs=np.array(c.logprobs, dtype=np.float32),
        )
        for c in lists
    ]
    (a,), (b,) = merge(lists), merge(arrays)
    assert (a.ids.tolist(), a.mask.tolist(), a.logprobs.tolist()) == (
        b.ids.tolist(),
        b.mask.tolist(),
        b.logprobs.tolist(),
    )


def test_show_is_json_and_readable() -> None:
    data = json.loads(
        json.dumps(show([call([1], [5, 6, 7]), call([1, 7, 8], [9], sequence=1), call([], [1], sequence=2)]))
    )
    assert data["rows"][0]["segments"][1] == {
        "start": 1, "end": 4, "trained": True, "logprob_mean": -0.5, "ids": [5, 6, 7], "text": "",
    }  # fmt: skip
    text = show_text(data)
    assert "+ [1:4]" in text
    assert "template_rewrote_history of row 0 at token 1" in text
    assert "1 x call:no_prompt_ids" in text


def test_run_stats_are_json_and_readable() -> None:
    data = json.loads(json.dumps(stats([[call([1], [2])], []])))
    assert data["stats"]["rollouts"] == 2
    assert data["dropped"] == {"rollout:no_model_calls": 1}
    assert "rows_per_rollout" in stats_text(data)
