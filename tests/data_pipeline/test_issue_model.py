"""Issue texts by a model: what it is shown, what is refused, and a server that is real, busy, away or strange."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline import issue_prompt as prompts
from data_pipeline.issue_model import KEY_VARIABLE, IssueModel, IssueWriter, Wanted
from swe_lightning.errors import UpstreamError, UserError

from .conftest import Answer, Server

GOOD = "Numbers above the limit come back unchanged\n\nI called `clamp(11, 3, 9)` and got 11. I expected 9, the limit."
PATCH = "--- a/calc.py\n+++ b/calc.py\n@@ -7 +7 @@\n-    if value > high:\n+    if value < high:\n"
LEAK = GOOD + "\n\nThe condition should be\n\n    if  value > high:\n"


def wanted(ran: list[int] | None = None, key: str = "calc.x") -> Wanted:
    def output() -> str:
        (ran if ran is not None else []).append(1)
        return ">       if value < high:\nE       assert 11 == 9\nFAILED tests/test_calc.py::test_clamp_high\n"

    return Wanted(key, "calc", "1.0", PATCH, ["tests/test_calc.py::test_clamp_high"], output)


def writer(server: Server, folder: Path, **changes: Any) -> IssueWriter:
    model = IssueModel(server.url, "a-model", pauses_s=(0.01, 0.01), **changes)
    return IssueWriter(model, folder / "out" / "issues.jsonl", seed=5)


def test_the_model_sees_the_behaviour_and_not_the_patch(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-very-secret")
    server = serve(f"<think>if value > high</think>\n```markdown\n{GOOD}\n```")
    with writer(server, tmp_path) as writing:
        assert writing.write(wanted()) == (GOOD + "\n", "")
    (asked,) = server.asked
    said = json.dumps(asked)
    assert "assert 11 == 9" in said
    assert "value < high" not in said
    assert "value > high" not in said
    assert (asked["model"], asked["seed"]) == ("a-model", 5)
    assert server.keys == ["Bearer sk-very-secret"]
    assert "sk-very-secret" not in said + (tmp_path / "out" / "issues.jsonl").read_text()


def test_a_text_that_leaks_is_asked_for_again_with_the_reason(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(LEAK, GOOD)
    with writer(server, tmp_path) as writing:
        assert writing.write(wanted()) == (GOOD + "\n", "")
    first, second = server.asked
    assert second["seed"] == first["seed"] + 1
    assert prompts.WHY["issue_leaks"] in second["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (LEAK, "issue_leaks"),
        (GOOD + "\n\n" + PATCH, "issue_leaks"),
        (GOOD + "\n\nindex 0123abc..4567def 100644", "issue_leaks"),
        ("It is broken.", "issue_empty"),
        (f"<think>{GOOD}", "issue_empty"),
        ("", "issue_empty"),
        (GOOD + " See test_clamp_high.", "issue_names_tests"),
        (GOOD + " See tests/test_calc.py.", "issue_names_tests"),
        (GOOD * 90, "issue_cut"),
        ((200, Server.completion(GOOD, "length")), "issue_cut"),
        (GOOD, None),
    ],
)
def test_three_useless_texts_are_a_reason(
    serve: Callable[..., Server], tmp_path: Path, answer: Answer, reason: str | None
) -> None:
    server = serve(answer)
    with writer(server, tmp_path) as writing:
        text, found = writing.write(wanted())
    assert (found, bool(text), len(server.asked)) == ((reason, False, 3) if reason else ("", True, 1))
    assert (tmp_path / "out").exists() is not bool(reason), "what was refused is not kept"


def test_texts_are_remembered(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, ran = serve(GOOD), list[int]()
    for _ in range(2):
        with writer(server, tmp_path) as writing:
            assert writing.write(wanted(ran))[0] == GOOD + "\n"
    assert (len(server.asked), len(ran)) == (1, 1)
    with writer(server, tmp_path) as writing:
        writing.write(wanted(ran, key="calc.y"))
    with writer(server, tmp_path, temperature=0.1) as writing:
        writing.write(wanted(ran))
    assert len(server.asked) == 3, "another bug, another model"


def test_a_busy_server_is_asked_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve((503, {"error": "loading"}), (200, b"<html>"), GOOD)
    with writer(server, tmp_path) as writing:
        assert writing.write(wanted()) == (GOOD + "\n", "")
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([(429, {"error": "slow down"})], UpstreamError, r"answered 429: .*slow down.*; the same command goes on"),
        ([(200, {"choices": []})], UpstreamError, "gave no chat completion"),
        ([(401, {"error": "no key"})], UserError, f"answered 401: .*environment variable {KEY_VARIABLE}"),
        ([(404, {"error": "no model"})], UserError, "answered 404: .*is the URL"),
    ],
)
def test_a_server_that_refuses_stops_the_command(
    serve: Callable[..., Server], tmp_path: Path, answers: list[Answer], error: type[Exception], message: str
) -> None:
    server = serve(*answers)
    with writer(server, tmp_path) as writing, pytest.raises(error, match=message):
        writing.write(wanted())
    assert len(server.asked) == (3 if error is UpstreamError else 1)


def test_a_server_that_is_away(serve: Callable[..., Server], tmp_path: Path) -> None:
    model = IssueModel("http://127.0.0.1:9/v1", "m", pauses_s=(0.01,))
    with IssueWriter(model, tmp_path / "j") as writing:
        with pytest.raises(UpstreamError, match=r"127\.0\.0\.1:9/v1 cannot be reached"):
            writing.write(wanted())


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http:///v1", "http://me:secret@host/v1"])
def test_urls_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(UserError, match="--issue-model"):
        IssueModel(url, "m").checked()


def test_short_and_plain_lines_are_no_secret() -> None:
    assert prompts.significant(["else:", "    return", "returned", "  x = 1 + y  ", "x = 1 + y"]) == ["x = 1 + y"]
