"""Tasks survive a round trip, whatever columns they came with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.records import RolloutState, Task

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    extra=st.dictionaries(st.text("abcdef_", min_size=3, max_size=9).map(lambda k: f"x{k}"), json_values, max_size=4)
)
def test_unknown_columns_survive(extra: dict[str, object]) -> None:
    row = {"instance_id": "a.b", "repo": "a/b", **extra}
    back = Task.model_validate(row).model_dump(mode="json")
    assert {k: back[k] for k in row} == row


def test_test_lists_published_as_json_strings() -> None:
    task = Task.model_validate({"instance_id": "a", "repo": "r", "FAIL_TO_PASS": '["t::x[a b]"]', "PASS_TO_PASS": "[]"})
    assert task.FAIL_TO_PASS == ["t::x[a b]"]
    assert task.PASS_TO_PASS == []


@pytest.mark.parametrize(("state", "terminal"), [("queuing", False), ("running", False), ("failed", True)])
def test_terminal_states(state: str, terminal: bool) -> None:
    assert RolloutState(state).terminal is terminal
