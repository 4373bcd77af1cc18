"""Spellings, architectures, digests: one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandbox_images.names import needed, pin_digests
from swe_lightning.errors import DataError
from swe_lightning.records import Task
from swe_lightning.sandbox.image_names import candidates, chosen_image, parse, task_image

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    "spelling",
    [
        "swesmith.x86_64.owner__repo.01234567",
        "jyangballin/swesmith.x86_64.owner__repo.01234567",
        "swebench/swesmith.x86_64.owner_1776_repo.01234567",
    ],
)
def test_three_spellings_lead_to_one_image(spelling: str) -> None:
    found = candidates(spelling, "x86_64")
    assert "swebench/swesmith.x86_64.owner_1776_repo.01234567:latest" in found[:4]
    assert "jyangballin/swesmith.x86_64.owner__repo.01234567:latest" in found
    assert found[0] == parse(spelling).name or "/" not in spelling


def test_this_machines_architecture_comes_first() -> None:
    found = candidates("swebench/swesmith.x86_64.owner_1776_repo.01234567", "aarch64")
    assert found[0] == "swebench/swesmith.arm64.owner_1776_repo.01234567:latest"
    assert "swebench/swesmith.x86_64.owner_1776_repo.01234567:latest" in found


@pytest.mark.parametrize(
    ("row", "image"),
    [
        ({"image_name": "swesmith.x86_64.a__b.1"}, "swesmith.x86_64.a__b.1"),
        ({"image": "swebench/x:v2"}, "swebench/x:v2"),
        ({"image_name": "swebench/x", "image_digest": DIGEST}, f"swebench/x@{DIGEST}"),
        ({"repo_path": "/somewhere"}, ""),
        ({"test_patch": "t", "base_commit": "c"}, "sweb.eval.x86_64.a__b-1:latest"),
        ({}, ""),
    ],
)
def test_the_image_of_a_task(row: dict[str, str], image: str) -> None:
    assert task_image(Task.model_validate({"instance_id": "a__b-1", "repo": "a/b", **row})) == image


def test_a_bench_row_is_found_on_the_hub() -> None:
    found = candidates("sweb.eval.x86_64.a__b-1:latest", "x86_64")
    assert found[0] == "swebench/sweb.eval.x86_64.a_1776_b-1:latest"


def test_references_are_taken_apart() -> None:
    assert parse("localhost:5000/a/b:c").registry == "localhost:5000"
    assert (parse("a/b").registry, parse("a/b").path, parse("a/b").tag) == ("", "a/b", "latest")
    assert parse(f"r.example.org/a@{DIGEST}").name == f"r.example.org/a@{DIGEST}"
    for wrong in ("UPPER/x", "a b", "", "x@sha256:12", "x:-", "../x"):
        with pytest.raises(DataError):
            parse(wrong)


def test_pinning_writes_the_digest_and_loses_nothing(tmp_path: Path) -> None:
    rows = [
        {"instance_id": "a", "repo": "r", "image_name": "one", "odd column": [1, "ü"]},
        {"instance_id": "b", "repo": "r", "image_name": "two", "image_digest": DIGEST},
        {"instance_id": "c", "repo": "r"},
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {image: len(tasks) for image, tasks in needed([str(file)]).items()} == {"one": 1, f"two@{DIGEST}": 1}
    other = "sha256:" + "cd" * 32
    pin_digests(file, {"one": other, f"two@{DIGEST}": other}, file)
    after = [json.loads(line) for line in file.read_text().splitlines()]
    assert after == [{**rows[0], "image_digest": other}, rows[1], rows[2]]


def test_an_image_is_the_tasks_own_else_the_recipes() -> None:
    assert chosen_image("of/task:1", "of/recipe:1") == "of/task:1"
    assert chosen_image("", "of/recipe:1") == "of/recipe:1"
    with pytest.raises(DataError, match="column image_name"):
        chosen_image("", None)
