"""Several bugs at once: which are put together, and that no single repair resolves the task."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations as pairs_of

import pytest

from data_pipeline import combine
from data_pipeline.issue_text import issue_text
from data_pipeline.mutations import Mutation, find_mutations
from data_pipeline.trees import Entry, Tree

SOURCE = b"""\
def first(a, b):
    if a == b:
        return a + b
    return a and b


def second(a, b):
    return a < b
"""
TREE: Tree = {"pkg/one.py": Entry(SOURCE), "pkg/two.py": Entry(SOURCE), "other/three.py": Entry(SOURCE)}
ONE = {(m.kind, m.line): m for m in find_mutations(SOURCE, "pkg/one.py")}


def at(kind: str, line: int, path: str = "pkg/one.py") -> Mutation:
    return replace(ONE[kind, line], path=path)


def test_all_bugs_are_in_the_files_whatever_their_order() -> None:
    parts = [at("equality", 2), at("arithmetic", 3), at("direction", 8), at("and_or", 4, "pkg/two.py")]
    wanted = SOURCE.replace(b"a == b", b"a != b").replace(b"a + b", b"a - b").replace(b"a < b", b"a > b")
    for order in (parts, parts[::-1]):
        files = combine.changed_files(TREE, order)
        assert files == {"pkg/one.py": wanted, "pkg/two.py": SOURCE.replace(b"a and b", b"a or b")}
    with pytest.raises(ValueError, match="another version"):
        combine.changed_files(TREE, [at("direction", 8), at("boundary", 8)])


def test_kinds_and_keys() -> None:
    a, b, c = at("equality", 2), at("direction", 8), at("and_or", 4, "pkg/two.py")
    assert [combine.kind_of(parts) for parts in ([a], [a, b], [a, c])] == ["equality", "combine_file", "combine_module"]
    assert combine.key_of([a]) == a.key
    assert combine.key_of([a, b]) == combine.key_of([b, a])
    assert len({combine.key_of(parts) for parts in ([a, b], [a, c], [b, c], [a, b, c])}) == 4


def test_only_neighbours_on_lines_of_their_own_are_put_together() -> None:
    parts = [
        *(at("equality", 2), at("arithmetic", 3), at("direction", 8), at("boundary", 8)),
        *(at("and_or", 4, "pkg/two.py"), at("and_or", 4, "other/three.py")),
    ]
    drawn = combine.drawn(parts, "seed")
    assert drawn == combine.drawn(parts, "seed")
    assert any(combine.drawn(parts, str(n)) != drawn for n in range(5))
    assert {len(indices) for indices in drawn} == {2, 3}
    for indices in drawn:
        assert 5 not in indices, "another directory"
        assert all(combine.apart(parts[i], parts[j]) for i, j in pairs_of(indices, 2))
        combine.changed_files(TREE, [parts[i] for i in indices])
    shapes = {tuple(sorted({(parts[i].path, parts[i].def_line) for i in pair})) for pair in drawn if len(pair) == 2}
    assert any(len(shape) == 1 for shape in shapes), "two in one function"
    assert any(len({path for path, _ in shape}) == 2 for shape in shapes), "two files"


@pytest.mark.parametrize(
    ("together", "alone", "masked"),
    [
        (["a", "b"], [["a"], ["b"]], False),
        (["a"], [["a"], ["b"]], True),  # the second bug does not show: repairing the first would resolve it
        (["a"], [["a"], ["a", "b"]], False),
        (["a", "b"], [["a"], ["b"], ["c"]], True),
    ],
)
def test_a_bug_that_hides_behind_another_one_does_not_count(
    together: list[str], alone: list[list[str]], masked: bool
) -> None:
    assert combine.is_masked(together, alone) is masked


def test_the_template_names_each_function_once() -> None:
    text = issue_text(
        "id", package="p", release="commit 0123", functions=["f", "g", "f"], files=["a/x.py", "a/x.py"], failing=["t"]
    )
    assert "`f` and `g`" in text
    assert text.count("x.py") <= 1
    assert "``" not in text
