"""What is cut is counted; a rollout that is half in is named."""

from __future__ import annotations

from swe_lightning.trajectory import apply_limits, merge
from swe_lightning.trajectory.limits import truncate_text


def rows_for_test(calls_of):
    return merge(calls_of([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]), ([8, 8, 8, 8], [9])]))


def test_tail_of_the_response_is_cut_exactly(calls_of) -> None:
    out = apply_limits(rows_for_test(calls_of), prompt_limit=4, response_limit=4)
    first, second = out.rows
    assert first.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert first.spans == [(2, 4, 0), (5, 6, 0)]
    assert second.ids.tolist() == [8, 8, 8, 8, 9]
    assert not out.dropped
    assert out.cut == 1
    assert out.lost_tokens == {"row:response_cut": 1}
    assert out.partial == ["r"]


def test_a_span_that_is_cut_off_takes_its_call_along(calls_of) -> None:
    first, _ = apply_limits(rows_for_test(calls_of), prompt_limit=4, response_limit=2).rows
    assert (first.ids.tolist(), first.spans, first.calls) == ([1, 2, 3, 4], [(2, 4, 0)], [0])


def test_prompt_over_the_limit_takes_the_row(calls_of) -> None:
    out = apply_limits(rows_for_test(calls_of), prompt_limit=3, response_limit=99)
    assert len(out.rows) == 1
    assert out.dropped == {"row:prompt_too_long": 1}
    assert out.partial == ["r"]


def test_whole_rollout_leaves_on_request(calls_of) -> None:
    rows = rows_for_test(calls_of) + merge(calls_of([([1], [2])], rollout_id="s"))
    out = apply_limits(rows, prompt_limit=3, response_limit=99, over="drop_rollout")
    assert [r.rollout_id for r in out.rows] == ["s"]
    assert out.dropped == {"row:prompt_too_long": 1, "row:rollout_over_limit": 1}
    assert out.lost_tokens.total() == 5
    assert out.partial == []


def test_within_limits_nothing_changes(calls_of) -> None:
    rows = rows_for_test(calls_of)
    out = apply_limits(rows, prompt_limit=4, response_limit=5)
    assert all(a is b for a, b in zip(out.rows, rows, strict=True))
    assert not out.dropped
    assert out.partial == []


def test_side_names_what_is_dropped_and_the_unit_is_in_the_key() -> None:
    assert truncate_text("ABCDEFGH", limit_chars=3, side="left") == "FGH"
    assert truncate_text("ABCDEFGH", limit_chars=3, side="right") == "ABC"
    assert truncate_text("AB", limit_chars=3, side="left") == "AB"
    assert truncate_text("ABC", limit_chars=0, side="left") == ""
