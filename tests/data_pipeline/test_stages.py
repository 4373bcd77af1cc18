"""Each stage on small tables: what leaves, under which reason, and what stays."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.pipeline import FilterSettings, Tools, filter_rows
from data_pipeline.repos import Branch, build_repository
from data_pipeline.sources import read_rows
from data_pipeline.stages import BY_NAME, STAGES, choose
from data_pipeline.stages.branches import BranchIndex, missing_branch, unresolvable_image
from data_pipeline.stages.duplicates import THRESHOLD, duplicate_issues, jaccard, shingles
from data_pipeline.stages.leaks import EvaluationSet, fix_lines, patch_leak, upstream
from data_pipeline.stages.rules import (
    bug_in_test,
    empty_issue,
    is_test,
    no_fail_to_pass,
    no_pass_to_pass,
    only_tests,
    too_many_tests,
    touched,
)
from data_pipeline.trees import Entry
from swe_lightning.errors import UserError

Make = Callable[..., dict[str, Any]]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"
SOURCE = "diff --git a/pkg/core.py b/pkg/core.py\n--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ -1 +1 @@\n"
FIX, BUG = "    return limit if value > limit else value", "    return limit if value >= limit else None"
PATCH = f"{SOURCE}-{FIX}\n+{BUG}\n"
TEST_PATCH = PATCH.replace("pkg/core.py", "tests/test_core.py")


def ids(count: int, name: str = "t") -> list[str]:
    return [f"tests/test_core.py::{name}{n}" for n in range(count)]


@pytest.mark.parametrize(
    ("rule", "change", "reason"),
    [
        (empty_issue, {"problem_statement": " \n\t"}, "empty_issue"),
        (empty_issue, {"problem_statement": "\N{NO-BREAK SPACE}"}, "empty_issue"),
        (empty_issue, {}, None),
        (too_many_tests, {"FAIL_TO_PASS": ids(1), "PASS_TO_PASS": ids(199)}, None),
        (too_many_tests, {"FAIL_TO_PASS": ids(1), "PASS_TO_PASS": ids(200)}, "test_cap"),
        (too_many_tests, {"FAIL_TO_PASS": ids(5060), "PASS_TO_PASS": []}, "test_cap"),
        (too_many_tests, {"PASS_TO_PASS": ids(100) * 5}, None),
        (no_fail_to_pass, {"FAIL_TO_PASS": []}, "no_fail_to_pass"),
        (no_fail_to_pass, {}, None),
        (no_pass_to_pass, {"PASS_TO_PASS": []}, "no_pass_to_pass"),
        (no_pass_to_pass, {"FAIL_TO_PASS": ids(18), "PASS_TO_PASS": ids(2)}, None),
        (no_pass_to_pass, {"FAIL_TO_PASS": ids(27), "PASS_TO_PASS": ids(3)}, "breaks_everything"),
        (no_pass_to_pass, {"FAIL_TO_PASS": ids(27), "PASS_TO_PASS": ids(4)}, None),
        (only_tests, {"patch": TEST_PATCH}, "tests_only"),
        (only_tests, {"patch": TEST_PATCH + PATCH}, None),
        (only_tests, {"patch": "  "}, "no_patch"),
        (bug_in_test, {"patch": PATCH + TEST_PATCH, "FAIL_TO_PASS": ids(1)}, "bug_in_test"),
        (bug_in_test, {"patch": PATCH, "FAIL_TO_PASS": ids(1)}, None),
        (patch_leak, {"patch": PATCH, "problem_statement": f"Why not\n{FIX.strip()}\n?"}, "patch_leak"),
        (patch_leak, {"patch": PATCH, "problem_statement": f"I see\n{BUG.strip()}\nthere"}, None),
        (patch_leak, {"patch": PATCH, "problem_statement": f"{BUG.strip()}", "test_patch": "x"}, "patch_leak"),
    ],
)
def test_rules(make_row: Make, rule: Any, change: dict[str, Any], reason: str | None) -> None:
    found = rule(make_row(**change), 200)
    assert (found[0] if found else None) == reason
    if found:
        assert found[1], "no reason without evidence"


def test_paths_of_a_patch() -> None:
    patch = (
        "diff --git a/a.py b/b.py\nsimilarity index 90%\nrename from a.py\nrename to b.py\n"
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n"
        "@@ -0,0 +1 @@\n+x = '--- a/no.py'\n"
        "diff --git a/bin.png b/bin.png\nBinary files differ\n"
    )
    assert touched(patch) == {"a.py", "b.py", "new.py", "bin.png"}
    assert [is_test(p) for p in ("tests/x.py", "a/test_b.py", "b_test.go", "conftest.py", "src/latest.py")] == [
        *[True] * 4,
        False,
    ]


def test_moved_and_trivial_lines_are_no_fix() -> None:
    row = {
        "patch": f"{SOURCE}-{FIX}\n-import something_quite_long\n-    else:\n+{FIX.strip()}\n"
        "-    kept_by_no_side(argument)\n"
    }
    assert fix_lines(row) == ["kept_by_no_side(argument)"]


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("swesmith/pandas-dev__pandas.95280573", "pandas-dev/pandas"),
        ("Pandas-Dev/pandas", "pandas-dev/pandas"),
        ("swesmith/mozilla__bleach.73871d76", "mozilla/bleach"),
        ("swesmith/luozhouyang__python-string-similarity.115acaac", "luozhouyang/python-string-similarity"),
        ("pypi/six", "pypi/six"),
    ],
)
def test_one_name_for_a_repository(published: str, name: str) -> None:
    assert upstream(published) == name


def test_the_evaluation_set_is_kept_apart(make_row: Make, tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    held = make_row(0, instance_id="django__django-1", repo="django/django", problem_statement="Forms  break\n")
    file.write_text(json.dumps(held) + "\n")
    rows = [
        make_row(0, instance_id="django__django-1"),
        make_row(1, problem_statement="forms break"),
        make_row(2, repo="swesmith/django__django.0123abcd"),
        *(make_row(n, problem_statement=f"Another matter {n}", patch=PATCH, image_name="i") for n in (3, 4, 5)),
    ]
    settings = FilterSettings(eval_set=(str(file),), val_size=1)
    result = filter_rows(rows, settings)
    assert result.report["dropped"] == {"eval_instance": 1, "eval_issue": 1}
    strict = filter_rows(rows, FilterSettings(eval_set=(str(file),), val_size=1, preset="strict"))
    reasons = {drop.instance_id: drop.reason for drop in strict.ledger.drops}
    assert reasons[rows[2]["instance_id"]] in ("eval_repository", "no_patch")
    assert EvaluationSet.of([held]).overlap([rows[2]], repositories=True)[0][0] == "eval_repository"


def test_duplicates_are_counted_exactly() -> None:
    words = [f"w{n}" for n in range(200)]
    other = random.Random(1).sample(words, 200)
    texts = [
        " ".join(words),
        "  W0 " + " ".join(words[1:]) + "!",  # the same words
        " ".join([*words[:197], "x", "y", "z"]),  # 193 of 199 shingles: near
        " ".join([*words[:100], "x", *words[101:]]),  # one word in the middle breaks five shingles: near
        " ".join([*words[:170], *[f"v{n}" for n in range(30)]]),  # 166 of 226: not near
        " ".join(other),
        "short",
        "Short.",
    ]
    rows = [{"instance_id": f"i{n}"} for n in range(len(texts))]
    found = duplicate_issues(rows, lambda row: texts[int(row["instance_id"][1:])])
    assert {n: reason for n, (reason, _) in found.items()} == {
        1: "duplicate_issue",
        2: "near_duplicate_issue",
        3: "near_duplicate_issue",
        7: "duplicate_issue",
    }
    assert "i0" in found[2][1]


@given(st.lists(st.integers(0, 40), min_size=30, max_size=60), st.lists(st.integers(0, 59), max_size=3), st.data())
def test_no_near_duplicate_is_missed_and_none_is_invented(base: list[int], places: list[int], data: Any) -> None:
    one = [f"w{n}" for n in base]
    changed = [data.draw(st.text("ab", min_size=1)) if n in places else word for n, word in enumerate(one)]
    texts = [" ".join(one), " ".join(changed)]
    share = jaccard(shingles(texts[0]), shingles(texts[1]))
    found = duplicate_issues([{"instance_id": "0"}, {"instance_id": "1"}], lambda row: texts[int(row["instance_id"])])
    assert bool(found) is (share >= THRESHOLD)


@given(
    st.lists(
        st.sampled_from(["ab", "ba", "a_b", "é", "ÉA", "x" * 300, "x" * 556, "日本", "7", " ", "\u2014", "\xa0", "'"])
    )
)
def test_shingles_are_those_of_the_words(pieces: list[str]) -> None:
    """Beside Python's own: as many different ones, and as many shared with a text that lacks the last piece."""
    texts = ["-".join(pieces), "-".join(pieces[:-1])]

    def spelled(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[n : n + 5]) for n in range(max(len(words) - 4, 1))}

    one, other = (spelled(text) for text in texts)
    assert [len(shingles(text)) for text in texts] == [len(one), len(other)]
    assert jaccard(*map(shingles, texts)) == len(one & other) / len(one | other)


def test_every_repository_is_asked_once(make_row: Make, tmp_path: Path) -> None:
    names = [make_row(n)["instance_id"] for n in range(6)]
    build_repository({"a.py": Entry(b"x\n")}, [Branch(name, {}) for name in names[:2]], tmp_path / "r.git")
    asked: list[str] = []

    def of_image(image: str) -> Any:
        asked.append(image)
        return "no such image in the registry" if image == "gone" else {names[3]}

    rows = [make_row(n, repo_path=str(tmp_path / "r.git")) for n in range(3)]
    rows += [make_row(n, image_name="kept") for n in (3, 4)] + [make_row(5, image_name="gone")]
    index = BranchIndex(of_image=of_image)
    rejected = missing_branch(rows, index)
    assert {n: evidence.split(" ", 1)[1] for n, (_, evidence) in rejected.items()} == {
        2: "has 3 branches, none of that name",
        4: "has 1 branches, none of that name",
        5: "no such image in the registry",
    }
    missing_branch(rows, index)
    assert sorted(asked) == ["gone", "kept"], "one index asks each image once"


@pytest.mark.parametrize(
    ("change", "leaves"),
    [
        ({}, True),
        ({"image_name": "swebench/swesmith.x86_64.luozhouyang_1776_python-string-similarity.115acaac"}, False),
        ({"image_name": "swesmith.x86_64.pandas-dev__pandas.95280573"}, False),
        ({"image_name": "localhost:5000/a/b:tag"}, False),
        ({"image_name": "Upper/Case"}, True),
        ({"image_name": "a b"}, True),
        ({"image_name": "../../x"}, True),
        ({"repo_path": "/r.git"}, False),
        ({"has_test_patch": True}, False),
    ],
)
def test_images(make_row: Make, change: dict[str, Any], leaves: bool) -> None:
    assert bool(unresolvable_image([make_row(**change)])) is leaves


def test_presets_and_single_stages(make_row: Make) -> None:
    assert [s.name for s in choose("paper") if not s.on_demand] == ["empty_issue", "missing_branch", "test_cap"]
    assert [s.name for s in choose("strict")] == [s.name for s in STAGES]
    rows = [make_row(n, problem_statement="the same words") for n in range(9)]
    assert filter_rows(rows, FilterSettings(val_size=1)).report["dropped"] == {}
    more = filter_rows(
        [*rows, make_row(9, problem_statement="other")], FilterSettings(val_size=1, add=("duplicate_issue",))
    )
    assert more.report["dropped"] == {"duplicate_issue": 8}
    empty = [*rows, make_row(9, problem_statement="")]
    assert filter_rows(empty, FilterSettings(val_size=1, skip=("empty_issue",))).report["dropped"] == {}
    for settings in (FilterSettings(add=("nosuch",)), FilterSettings(preset="loose")):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"nosuch: no such stage; choose among empty_issue|--preset loose"):
            filter_rows(rows, settings)


def test_the_earlier_stage_takes_the_row(make_row: Make) -> None:
    """A row over the cap without its branch counts as missing_branch, although the cap was seen first."""
    rows = [make_row(n, image_name="i") for n in range(4)] + [make_row(4, image_name="i", PASS_TO_PASS=ids(300))]
    branches = {"i": [row["instance_id"] for row in rows[:4]]}
    result = filter_rows(rows, FilterSettings(val_size=1), Tools(branches=branches))
    assert result.report["dropped"] == {"missing_branch": 1}


def test_every_stage_is_documented() -> None:
    text = DOCS.read_text()
    for stage in STAGES:
        marks = "yes" if "paper" in stage.presets else "no"
        reasons = ", ".join(f"`{reason}`" for reason in stage.reasons)
        assert f"| `{stage.name}` | {reasons} | {stage.says} | {marks} |" in text
    assert len(BY_NAME) == len(STAGES)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/tasks is not here")
def test_rules_on_published_rows() -> None:
    """Verified's own issue texts seldom show the whole fix, and its fixes never lie in tests alone."""
    rows = read_rows([str(SHARED / "swebench_verified_500.jsonl.gz")])
    counts: Counter[str] = Counter()
    for row in rows:
        for rule in (no_fail_to_pass, only_tests, bug_in_test, patch_leak):
            counts[rule.__name__] += rule(row) is not None
    assert (counts["no_fail_to_pass"], counts["only_tests"], counts["bug_in_test"]) == (0, 0, 0)
    assert 5 <= counts["patch_leak"] <= 75
