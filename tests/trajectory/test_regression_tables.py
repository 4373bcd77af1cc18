"""The numbered regression file of the merge: calls as (prompt ids, response ids) -> rows as (ids, mask, calls).

Changing a number here is a decision about what the policy learns. `not_rows` are values other implementations produce.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swe_lightning.trajectory import merge, rows_of


@dataclass
class Case:
    name: str
    calls: list[tuple[list[int], list[int]]]
    rows: list[tuple[list[int], list[int], list[int]]]
    breaks: list[str] = field(default_factory=list)
    not_rows: list[tuple[list[int], list[int]]] = field(default_factory=list)


CASES = [
    Case("01 one call", [([1, 2], [3, 4])], [([1, 2, 3, 4], [0, 0, 1, 1], [0])]),
    Case(
        "02 the prefix is the whole accumulated sequence, not the newest turn",
        [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])],
        [([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1], [0, 1, 2])],
        not_rows=[([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 0, 1])],
    ),
    Case(
        "03 the newline the template puts between turns is kept and untrained",
        [([10], [11, 99]), ([10, 11, 99, 198, 12], [13, 99])],
        [([10, 11, 99, 198, 12, 13, 99], [0, 1, 1, 0, 0, 1, 1], [0, 1])],
        not_rows=[([10, 11, 99, 12, 13, 99], [0, 1, 1, 0, 1, 1])],
    ),
    Case(
        "04 an end token the template put in, not sampled, stays untrained",
        [([10], [11]), ([10, 11, 99, 198, 12], [13])],
        [([10, 11, 99, 198, 12, 13], [0, 1, 0, 0, 0, 1], [0, 1])],
    ),
    Case(
        "05 the template drops the thinking part: a second row, no error",
        [([1], [5, 6, 7]), ([1, 7, 8], [9])],
        [([1, 5, 6, 7], [0, 1, 1, 1], [0]), ([1, 7, 8, 9], [0, 0, 0, 1], [1])],
        ["template_rewrote_history"],
        not_rows=[([1, 7, 8, 9], [0, 1, 0, 1])],
    ),
    Case(
        "06 a sub-agent between two turns of the main agent",
        [([1], [2]), ([50], [51]), ([1, 2, 3], [4])],
        [([1, 2, 3, 4], [0, 1, 0, 1], [0, 2]), ([50, 51], [0, 1], [1])],
        ["new_context"],
        not_rows=[([1, 2], [0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])],
    ),
    Case(
        "07 two sub-agents interleaved turn by turn with the main agent",
        [
            ([1], [2]),
            ([50], [51]),
            ([60], [61]),
            ([50, 51, 52], [53]),
            ([60, 61, 62], [63]),
            ([1, 2, 3], [4]),
            ([50, 51, 52, 53, 54], [55]),
        ],
        [
            ([1, 2, 3, 4], [0, 1, 0, 1], [0, 5]),
            ([50, 51, 52, 53, 54, 55], [0, 1, 0, 1, 0, 1], [1, 3, 6]),
            ([60, 61, 62, 63], [0, 1, 0, 1], [2, 4]),
        ],
        ["new_context", "new_context"],
    ),
    Case(
        "08 a sub-agent of a sub-agent",
        [([1], [2]), ([50], [51]), ([70], [71]), ([50, 51, 71], [52]), ([1, 2, 52], [3])],
        [
            ([1, 2, 52, 3], [0, 1, 0, 1], [0, 4]),
            ([50, 51, 71, 52], [0, 1, 0, 1], [1, 3]),
            ([70, 71], [0, 1], [2]),
        ],
        ["new_context", "new_context"],
    ),
    Case(
        "09 rollback: the shared reply is trained once, in the row that sampled it",
        [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 8], [9])],
        [([1, 2, 3, 4], [0, 1, 0, 1], [0, 1]), ([1, 2, 8, 9], [0, 0, 0, 1], [2])],
        ["branch"],
        not_rows=[([1, 2, 8, 9], [0, 1, 0, 1])],
    ),
    Case(
        "10 rollback, then both branches go on",
        [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 8], [9]), ([1, 2, 8, 9, 7], [6]), ([1, 2, 3, 4, 5], [6])],
        [
            ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1], [0, 1, 4]),
            ([1, 2, 8, 9, 7, 6], [0, 0, 0, 1, 0, 1], [2, 3]),
        ],
        ["branch"],
    ),
    Case(
        "11 compaction: the history is replaced by a summary",
        [([1, 9], [2]), ([1, 9, 2, 3], [4]), ([1, 9, 40, 41], [5])],
        [([1, 9, 2, 3, 4], [0, 0, 1, 0, 1], [0, 1]), ([1, 9, 40, 41, 5], [0, 0, 0, 0, 1], [2])],
        ["new_context"],
    ),
    Case(
        "12 two samples of one prompt, each continued",
        [([1], [2]), ([1], [3]), ([1, 3, 8], [4]), ([1, 2, 8], [5])],
        [([1, 2, 8, 5], [0, 1, 0, 1], [0, 3]), ([1, 3, 8, 4], [0, 1, 0, 1], [1, 2])],
        ["branch"],
    ),
    Case(
        "13 equal samples of one prompt, each continued: two draws, two rows",
        [([1], [2]), ([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3], [5])],
        [([1, 2, 3, 4], [0, 1, 0, 1], [0, 2]), ([1, 2, 3, 5], [0, 1, 0, 1], [1, 3])],
        ["branch"],
    ),
    Case(
        "14 of several prefixes the longest row is continued",
        [([1], [2]), ([1, 2], [3]), ([1], [2]), ([1, 2, 3, 4], [5])],
        [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0, 1, 3]), ([1, 2], [0, 1], [2])],
        ["branch"],
    ),
    Case(
        "15 a prompt that ends inside an earlier row is a new sample",
        [([1, 2, 3], [4]), ([1, 2], [7])],
        [([1, 2, 3, 4], [0, 0, 0, 1], [0]), ([1, 2, 7], [0, 0, 1], [1])],
        ["branch"],
    ),
    Case(
        "16 other text in an old observation: the replies after it survive, the row does not",
        [([1], [2]), ([1, 2, 30, 31], [4]), ([1, 2, 32, 4, 5], [6])],
        [([1, 2, 30, 31, 4], [0, 1, 0, 0, 1], [0, 1]), ([1, 2, 32, 4, 5, 6], [0, 0, 0, 0, 0, 1], [2])],
        ["text_rewritten"],
    ),
    Case(
        "17 the template puts an empty thinking block before old replies",
        [([1, 8], [5, 6]), ([1, 8, 20, 21, 5, 6, 3], [7])],
        [([1, 8, 5, 6], [0, 0, 1, 1], [0]), ([1, 8, 20, 21, 5, 6, 3, 7], [0, 0, 0, 0, 0, 0, 0, 1], [1])],
        ["template_rewrote_history"],
    ),
    Case(
        "18 a few ids in the middle of a reply differ: without text nobody can say why",
        [([1], [5, 6, 7, 8, 9, 10]), ([1, 5, 66, 77, 8, 9, 10, 3], [4])],
        [
            ([1, 5, 6, 7, 8, 9, 10], [0, 1, 1, 1, 1, 1, 1], [0]),
            ([1, 5, 66, 77, 8, 9, 10, 3, 4], [0, 0, 0, 0, 0, 0, 0, 0, 1], [1]),
        ],
        ["unknown"],
    ),
    Case(
        "19 a break in the middle of five turns: go on in a second row",
        [
            ([1], [2]),
            ([1, 2, 3], [4]),
            ([1, 2, 3, 44, 5], [6]),
            ([1, 2, 3, 44, 5, 6, 7], [8]),
            ([1, 2, 3, 44, 5, 6, 7, 8, 9], [10]),
        ],
        [
            ([1, 2, 3, 4], [0, 1, 0, 1], [0, 1]),
            ([1, 2, 3, 44, 5, 6, 7, 8, 9, 10], [0, 0, 0, 0, 0, 1, 0, 1, 0, 1], [2, 3, 4]),
        ],
        ["branch"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows(case: Case, calls_of) -> None:
    calls = calls_of(case.calls)
    rows = merge(calls)
    assert [(r.ids.tolist(), r.mask.tolist(), r.calls) for r in rows] == case.rows
    for ids, mask in case.not_rows:
        assert (ids, mask) not in [(r.ids.tolist(), r.mask.tolist()) for r in rows]
    assert sum(r.trained_tokens for r in rows) == sum(len(c.response_ids) for c in calls)
    for row in rows:
        assert (row.ids.dtype.name, row.mask.dtype.name, row.logprobs.dtype.name) == ("int32", "int8", "float32")
        assert not row.logprobs[row.mask == 0].any()
        own = [value for i in row.calls for value in calls[i].logprobs]
        assert row.logprobs[row.mask == 1].tolist() == own


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_breaks_and_ledger(case: Case, calls_of) -> None:
    report = rows_of(calls_of(case.calls), duplicate_calls="keep")
    assert [found.kind.value for found in report.breaks] == case.breaks
    report.check()
    assert report.stats["rows"] == len(case.rows)
    tokens = {tuple(r.ids[: i + 1].tolist()) for r in report.rows for i in range(len(r.ids))}
    assert report.stats["unique_tokens"] == len(tokens)
    assert report.stats["duplicated_tokens"] == sum(len(r.ids) for r in report.rows) - len(tokens)
