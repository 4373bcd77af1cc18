"""Cases met in the field, by their number: the right rows, and the wrong ones that others produced.

The merge itself is pinned in test_regression_tables.py; replayed templates (M4) are in test_replay.py; raw text and
arguments (M5) in tests/gateway/test_recording.py.
"""

from __future__ import annotations

import math

import pytest

from swe_lightning.records import ModelCall
from swe_lightning.trajectory import merge, rows_of
from swe_lightning.trajectory.limits import truncate_text

Table = list[tuple[list[int], list[int]]]


def pairs(table: Table) -> list[ModelCall]:
    return [
        ModelCall("r", prompt, response, [-0.5] * len(response), sequence=i)
        for i, (prompt, response) in enumerate(table)
    ]


def rows(table: Table) -> Table:
    return [(r.ids.tolist(), r.mask.tolist()) for r in merge(pairs(table))]


def test_m1_the_prefix_is_everything_so_far() -> None:
    found = rows([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])])
    assert found == [([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1])]
    assert len(found) != 2  # prefix reset to the newest turn: the third turn opens a row


def test_m3_the_newline_between_turns_is_kept_and_untrained() -> None:
    found = rows([([10], [11, 99]), ([10, 11, 99, 198, 12], [13, 99])])
    assert found == [([10, 11, 99, 198, 12, 13, 99], [0, 1, 1, 0, 0, 1, 1])]
    assert 198 in found[0][0]  # a turn rendered by itself loses it


def test_m4_a_template_that_drops_thinking_costs_a_row_and_no_rollout() -> None:
    report = rows_of(pairs([([1], [5, 6, 7]), ([1, 7, 8], [9])]))
    found = [(r.ids.tolist(), r.mask.tolist()) for r in report.rows]
    assert found == [([1, 5, 6, 7], [0, 1, 1, 1]), ([1, 7, 8, 9], [0, 0, 0, 1])]
    assert report.stats["merge_rate"] == 0.0
    assert report.stats["duplicated_share"] == pytest.approx(1 / 8)


def test_m6_a_mismatch_in_the_middle_forks_and_goes_on() -> None:
    report = rows_of(
        pairs([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 99, 4, 5], [6]), ([1, 2, 99, 4, 5, 6, 7], [8]),
               ([1, 2, 99, 4, 5, 6, 7, 8, 9], [10])])
    )  # fmt: skip
    assert len(report.rows) == 2
    assert [r.calls for r in report.rows] == [[0, 1], [2, 3, 4]]
    report.check()


def test_m8_order_says_nothing_about_who_speaks() -> None:
    found = rows([([1], [2]), ([50], [51]), ([1, 2, 3], [4])])
    assert found == [([1, 2, 3, 4], [0, 1, 0, 1]), ([50, 51], [0, 1])]
    assert ([1, 2], [0, 1]) not in found  # the main agent cut in two by the call of another


def test_m9_every_sampled_token_trains_exactly_once() -> None:
    """Histories that show old replies again and again: 12 sampled tokens, not the 30 that re-rendering would count."""
    table: Table = [([1, 9], [2, 3, 4]), ([1, 9, 2, 3, 4, 5], [6, 7, 8])]
    table += [([1, 2, 3, 4, 6, 7, 8], [10, 11, 12]), ([1, 9, 2, 3, 4, 5, 6, 7, 8, 13], [14, 15, 16])]
    found = rows(table)
    assert sum(sum(mask) for _, mask in found) == sum(len(response) for _, response in table) == 12
    assert sum(sum(mask) for _, mask in found) != sum(len(p) + len(c) - 1 for p, c in table)
    retried = pairs([([1], [2]), ([1], [3])])
    for i, call in enumerate(retried):
        call.started_at, call.ended_at = 2.0 * i + 1, 2.0 * i + 2
    report = rows_of(retried)
    assert report.stats["trained_tokens"] == sum(len(c.response_ids) for c in retried if not c.superseded) == 1


def test_m11_only_recorded_spans_train_never_the_header_or_the_newline() -> None:
    header = [151644, 77091, 198]
    ((ids, mask),) = rows([([1, *header], [7, 99]), ([1, *header, 7, 99, 198, 20, *header], [8, 99])])
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [7, 99, 8, 99]
    assert not any(m for i, m in zip(ids, mask, strict=True) if i in (*header, 20))


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_m12_a_token_the_engine_gave_no_logprob_was_appended_not_sampled(unknown: float | None) -> None:
    (row,) = merge([ModelCall("r", [1], [7, 99], [-0.25, unknown])])
    assert row.ids.tolist() == [1, 7, 99]
    assert (row.mask.tolist(), row.logprobs.tolist()) == ([0, 1, 0], [0.0, -0.25, 0.0])


def test_m13_left_drops_the_left_and_the_unit_is_in_the_name() -> None:
    assert truncate_text("ABCDEFGH", limit_chars=3, side="left") == "FGH"
    assert truncate_text("ABCDEFGH", limit_chars=3, side="left") != "ABC"
    with pytest.raises(TypeError):
        truncate_text("ABCDEFGH", limit=3, side="left")  # type: ignore[call-arg]
