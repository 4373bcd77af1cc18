"""Kinds of bugs on small sources: (source line, kind, what the line becomes)."""

from __future__ import annotations

import ast

import pytest

from data_pipeline.edits import repair
from data_pipeline.mutations import changes_meaning, find_mutations
from swe_lightning.policy.edits import EDITS, Edit


def lines(body: str, kind: str | None = None) -> list[str]:
    source = f"def f(a, b, c):\n    {body}\n".encode()
    return [m.after.strip() for m in find_mutations(source, "m.py") if kind in (None, m.kind)]


TABLE = [
    ("return a == b", "equality", ["return a != b"]),
    ("return a != b", "equality", ["return a == b"]),
    ("return a < b", "direction", ["return a > b"]),
    ("return a >= b", "direction", ["return a <= b"]),
    ("return a < b", "boundary", ["return a <= b"]),
    ("return a >= b", "boundary", ["return a > b"]),
    ("return a and b or c", "and_or", ["return a or b or c", "return a and b and c"]),
    ("return a in b", "membership", ["return a not in b"]),
    ("return a not  in b", "membership", ["return a in b"]),
    ("return a is not b", "identity", ["return a is b"]),
    ("return a is b", "identity", ["return a is not b"]),
    ("return a + b", "arithmetic", ["return a - b"]),
    ("return a // b", "arithmetic", ["return a * b"]),
    ("a += 1", "augmented", ["a -= 1"]),
    ("return True", "boolean", ["return False"]),
    ("return a[7]", "integer", ["return a[6]", "return a[8]"]),
    ("return a[0]", "integer", ["return a[1]"]),
    ("return any(a)", "any_all", ["return all(a)"]),
    ("return max(a, b)", "min_max", ["return min(a, b)"]),
    ("return a.startswith(b)", "prefix_suffix", ["return a.endswith(b)"]),
    ("return a.lower()", "letter_case", ["return a.upper()"]),
    ("return a.lstrip()", "strip_side", ["return a.rstrip()"]),
    ("a.append(b)", "extend", ["a.extend(b)"]),
    ("return -a", "drop_minus", ["return a"]),
    ("return a if b else c", "negate", ["return a if not b else c"]),
    ("return a if b == 1 and c else c", "negate", ["return a if not b == 1 and c else c"]),
    ("return (not (a)) + 1", "drop_not", ["return (a) + 1"]),
    ("return a.b", "return_not", ["return not a.b"]),
    ("return f(a, b)", "swap_arguments", ["return f(b, a)"]),
    ("return f((a), g(b, 1))", "swap_arguments", ["return f(g(b, 1), (a))", "return f((a), g(1, b))"]),
]


@pytest.mark.parametrize(("body", "kind", "expected"), TABLE)
def test_kind(body: str, kind: str, expected: list[str]) -> None:
    assert [line.replace("  ", " ") for line in lines(body, kind)] == [e.replace("  ", " ") for e in expected]


def test_branch_and_loop_kinds() -> None:
    source = b"def f(a):\n    for x in a:\n        if x:\n            y = 1\n            break\n    return a\n"
    found = {m.kind: m.apply(source).decode() for m in find_mutations(source, "m.py")}
    assert found["loop_jump"].count("continue") == 1
    assert "        if x:\n            pass\n    return a" in found["drop_branch"]


def test_every_kind_found_can_be_named() -> None:
    from data_pipeline.mutation_rules import KINDS

    assert {kind for _, kind, _ in TABLE} | {"loop_jump", "drop_branch"} <= KINDS
    assert {
        m.kind for body, _, _ in TABLE for m in find_mutations(f"def f(a, b):\n    {body}\n".encode(), "m.py")
    } <= KINDS


def test_at_least_twelve_kinds() -> None:
    assert len({kind for _, kind, _ in TABLE} | {"loop_jump", "drop_branch"}) >= 12


LEFT_ALONE = ["x: Literal[1]", "print(f'{a == b}')", "assert a == b", "'''a == b'''", "return None", "f(*a, b)"]


@pytest.mark.parametrize("body", LEFT_ALONE)
def test_left_alone(body: str) -> None:
    assert lines(body) == []


def test_only_inside_functions_and_not_in_decorators() -> None:
    source = b"X = 1 == 2\n@d(1 == 2)\ndef f(a: Literal[1]):\n    pass\n"
    assert find_mutations(source, "m.py") == []


def test_places_are_exact_with_other_alphabets_and_line_ends() -> None:
    source = 'def f(a):\r\n    é = "äö" == a\r\n    return é and a\r\n'.encode()
    found = find_mutations(source, "m.py")
    assert [(m.kind, m.line) for m in found] == [("equality", 2), ("and_or", 3)]
    for mutation in found:
        mutated = mutation.apply(source)
        assert mutated.count(b"\r\n") == 3
        assert mutated.splitlines()[mutation.line - 1].decode() == mutation.after.rstrip("\r")
        assert changes_meaning(source, mutated)


def test_function_and_first_line_of_its_decorators() -> None:
    source = (
        b"class C:\n    @a\n    @b\n    def f(self):\n        def g():\n            return 1\n        return g() == 2\n"
    )
    places = {m.function: m.def_line for m in find_mutations(source, "m.py")}
    assert places == {"g": 5, "f": 2}


def test_order_and_keys_are_stable_and_unique() -> None:
    source = b"def f(a, b):\n    return a == b and a < 3 or b in a\n"
    first, second = find_mutations(source, "m.py"), find_mutations(source, "m.py")
    assert first == second
    assert [m.start for m in first] == sorted(m.start for m in first)
    assert len({m.key for m in first}) == len(first)
    assert {m.key for m in first}.isdisjoint(m.key for m in find_mutations(source, "other.py"))


@pytest.mark.parametrize("source", [b"def f(:\n", b"\xff\xfe", "\ufeffdef f(a):\n    return a == 1\n".encode(), b""])
def test_unusable_sources_have_no_mutations(source: bytes) -> None:
    assert find_mutations(source, "m.py") == []


def test_applying_to_another_version_is_refused() -> None:
    mutation = find_mutations(b"def f(a):\n    return a == 1\n", "m.py")[0]
    with pytest.raises(ValueError, match=r"m.py:2"):
        mutation.apply(b"def g(a):\n    return 2 * a * a\n")


def test_meaning() -> None:
    assert not changes_meaning(b"x = 1\n", b"x  =  1\n")
    assert not changes_meaning(b"x = 1\n", b"x = = 1\n")
    assert changes_meaning(b"x = 1\n", b"x = 2\n")


REPAIRS = [
    ("if a != b:", "if a == b:", ("!=", "==")),
    ("return a or b", "return a and b", (" or ", " and ")),
    ("if not a:", "if a:", ("if not ", "if ")),
    ("x[1] = y[1]", "x[0] = y[1]", ("1", "0")),
    ("x[1] = y[1]", "x[1] = y[0]", None),  # the first match is another one
    ("return a * b", "return a + b", None),
    ("same", "same", None),
]


@pytest.mark.parametrize(("mutated", "original", "expected"), REPAIRS)
def test_repair_is_the_first_match_of_one_edit(mutated: str, original: str, expected: Edit | None) -> None:
    assert repair(mutated, original) == expected


def test_the_closed_set_is_closed_under_undo() -> None:
    assert len(EDITS) == 36
    assert len(set(EDITS)) == 36
    assert {(replacement, pattern) for pattern, replacement in EDITS} == set(EDITS)


def test_every_mutation_of_the_tables_is_python() -> None:
    for body, kind, _ in TABLE:
        source = f"def f(a, b, c):\n    {body}\n".encode()
        for mutation in find_mutations(source, "m.py"):
            ast.parse(mutation.apply(source)), kind
