"""Real conversations through real tokenizers and chat templates: the report names every break.

The tokenizers come with the [dev] extra, the templates are fetched once. A conversation of our own is replayed
everywhere; the 15 of real agents, and real token drift, where ../shared/data is.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import replay
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import RowsReport, rows_of
from swe_lightning.trajectory.breaks import BreakKind

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ASSISTANT = [151644, 77091, 198]  # <|im_start|> assistant \n, Qwen3 ids
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")

APPEND_ONLY = {
    ("qwen3", "qwen3", False),
    ("qwen3", "qwen3_training", True),
    ("qwen35", "qwen3_5_nothink_training", False),
    ("qwen35", "qwen3_5_think_training", True),
}


def real_tokens(name: str) -> replay.Tokens:
    try:
        return replay.tokens(name)
    except replay.Missing as error:
        pytest.skip(str(error))


def report_of(conversations: list[replay.Messages], tokenizer: str, chat: str, thinking: bool) -> RowsReport:
    try:
        return replay.report_of(conversations, tokenizer, chat, thinking)
    except replay.Missing as error:
        pytest.skip(str(error))


def check_report(total: RowsReport, conversations: int, merges: bool) -> None:
    """One row per rollout, or a named break at every turn with the evidence beside it; nothing in between."""
    stats = total.stats
    if merges:
        assert (stats["merge_rate"], stats["rows_per_rollout"], stats["duplicated_share"]) == (1.0, 1.0, 0.0)
        assert not total.breaks
    else:
        assert stats["merge_rate"] == 0.0
        assert stats["duplicated_share"] > 0.4
        assert Counter(b.kind for b in total.breaks) == {BreakKind.TEMPLATE: stats["calls"] - conversations}
        for found in total.breaks:
            at = found.position - found.window_start
            assert found.row_ids[:at] == found.prompt_ids[:at]
            assert found.row_ids[at : at + 1] != found.prompt_ids[at : at + 1]
            assert "think" in found.row_text or "Step" in found.row_text


@pytest.mark.parametrize(("tokenizer", "chat", "thinking"), replay.CASES)
def test_m4_merge_rate_per_template(tokenizer: str, chat: str, thinking: bool) -> None:
    total = report_of([replay.SMALL], tokenizer, chat, thinking)
    assert (total.stats["calls"], total.dropped) == (4, {})
    check_report(total, 1, (tokenizer, chat, thinking) in APPEND_ONLY)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer", "chat", "thinking"), replay.CASES)
def test_m4_merge_rate_per_template_of_real_agents(tokenizer: str, chat: str, thinking: bool) -> None:
    conversations = [replay.load(path) for path in sorted((DATA / "trajectories").glob("*__*.traj.json"))]
    total = report_of(conversations, tokenizer, chat, thinking)
    assert (len(conversations), total.stats["calls"], total.dropped) == (15, 465, {})
    assert total.stats["trained_tokens"] == total.stats["sampled_tokens"]
    check_report(total, 15, (tokenizer, chat, thinking) in APPEND_ONLY)


@needs_data
def test_each_real_drift_is_named_retokenised() -> None:
    """' Skinny' and four more words came back as other ids of the same text."""
    tokens = real_tokens("qwen3")
    data = json.loads((DATA / "tokens" / "maybe_correct_merged_tokens_test_data.json").read_text())
    seen, rerendered, truth = data["seen_token_ids"], data["output_prompt_token_ids"], data["expected_output"]
    start = _after(seen, ASSISTANT)
    first = ModelCall("r", seen[:start], seen[start:], [-1.0] * (len(seen) - start))
    tail = truth[len(seen) :]
    drifts = list(_drifts(seen, rerendered))
    assert len(drifts) == 5
    for position, old, new in drifts:
        drifted = [*seen[:position], *new, *seen[position + len(old) :], *tail]
        report = rows_of([first, ModelCall("r", drifted, [7], [-1.0], sequence=1)], decode=tokens.decode)
        (found,) = report.breaks
        assert (found.kind, found.position) == (BreakKind.RETOKENISED, position)
        assert found.row_ids[position - found.window_start :][: len(old)] == old
        assert found.prompt_ids[position - found.window_start :][: len(new)] == new
        without_text = rows_of([first, ModelCall("r", drifted, [7], [-1.0], sequence=1)])
        assert without_text.breaks[0].kind == BreakKind.UNKNOWN
    both = [first, ModelCall("r", rerendered, [7], [-1.0], sequence=1)]
    assert [b.position for b in rows_of(both, decode=tokens.decode).breaks] == [drifts[0][0]]
    exact = rows_of([first, ModelCall("r", truth, [7], [-1.0], sequence=1)])
    assert exact.stats["merge_rate"] == 1.0


@needs_data
def test_changed_newline_in_a_reply_is_named_rewritten() -> None:
    """The policy ended a sentence with two newlines; the template rendered one."""
    tokens = real_tokens("qwen3")
    data = json.loads((DATA / "tokens" / "test_vllmasyncgenerationworker_replace_prefix_worker.json").read_text())
    seen, rendered = data["model_token_ids"], data["template_token_ids"]
    start = _after(seen, ASSISTANT)
    end = seen.index(151645, start) + 1
    first = ModelCall("r", seen[:start], seen[start:end], [-1.0] * (end - start))
    (found,) = rows_of([first, ModelCall("r", rendered, [7], [-1.0], sequence=1)], decode=tokens.decode).breaks
    assert found.kind == BreakKind.REWRITTEN
    assert [i for i, (a, b) in enumerate(zip(seen, rendered, strict=True)) if a != b] == [found.position]
    assert rows_of([first, ModelCall("r", seen, [7], [-1.0], sequence=1)]).stats["merge_rate"] == 1.0


def _after(ids: list[int], part: list[int]) -> int:
    return next(i for i in range(len(ids)) if ids[i - len(part) : i] == part)


def _drifts(a: list[int], b: list[int]):
    """(position in a, ids in a, ids in b) of each short difference."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        d, e = next((d, t - d) for t in range(2, 20) for d in range(t) if a[i + d :][:6] == b[j + t - d :][:6])
        yield i, a[i : i + d], b[j : j + e]
        i, j = i + d, j + e
