"""Demonstrations as rows: what is trained is exactly what the demonstrator said, and where the lines come from."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from swe_lightning.errors import DataError
from swe_lightning.policy.demos import row_of
from swe_lightning.policy.standin import library

SYSTEM, USER, ASSISTANT, END = 1, 2, 3, 4


class Markers:
    """The part of a tokenizer that `row_of` reads."""

    unk_token_id = 0

    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.ids.get(token.strip("<|>"), 0)


MARKERS = Markers(assistant=ASSISTANT, end=END)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([SYSTEM, 9, END, USER, 8, END], [0, 0, 0, 0, 0, 0]),
        ([USER, 8, END, ASSISTANT, 7, 6, END], [0, 0, 0, 0, 1, 1, 1]),  # the end token too, the marker not
        ([ASSISTANT, 7, END, USER, 8, END, ASSISTANT, 6, END], [0, 1, 1, 0, 0, 0, 0, 1, 1]),
        ([USER, 8, END, ASSISTANT, END], [0, 0, 0, 0, 1]),  # an empty reply is its end
        ([USER, 8, END, ASSISTANT, 7, 6], [0, 0, 0, 0, 0, 0]),  # a reply that was cut off teaches nothing
        ([USER, 8, END, ASSISTANT], [0, 0, 0, 0]),
        ([], []),
    ],
)
def test_mask_of_a_demonstration(ids: list[int], mask: list[int]) -> None:
    row = row_of(MARKERS, ids, "demo")
    assert row.mask.tolist() == mask
    assert row.ids.tolist() == ids
    assert not row.logprobs.any()
    assert (row.rollout_id, row.group_id) == ("demo", "demo")


def test_a_foreign_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="create_tiny"):
        row_of(Markers(end=END), [1, 2], "demo")


def test_lines_come_from_the_library_and_never_from_packages_or_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tests" / "lib"  # where the library itself lies says nothing
    for number, place in enumerate(("good.py", "sub/fine.py", "site-packages/a.py", "test/b.py", "sub/tests/c.py")):
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def f{number}(a, b):\n    return a == b and a > {number}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    kinds, _ = library.__wrapped__(seed=0)
    assert {candidate.path for kind in kinds for candidate in kind} == {"good.py", "sub/fine.py"}
