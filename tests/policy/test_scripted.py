"""Scripted strategies over HTTP: the same wire as the model server, and token rows equal to the stand-in's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from swe_lightning.errors import DataError, UserError
from swe_lightning.policy.demonstrator import LOOK, SUBMIT, Demonstrator, command_of
from swe_lightning.policy.scripted import ByteTokenizer, make_strategy, seed_of
from swe_lightning.policy.standin import ISSUE, SYSTEM, Bug, Shell, answer, bugs, play
from swe_lightning.policy.sync import ModelServer
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import merge

BUG = Bug("f", "a.py", 3, "test_f", "    if a == b and not c:", "    if a != b and not c:", 2, "2 failed\n")


@pytest.fixture(scope="module")
def byte_server(start_server: Any) -> ModelServer:
    started: ModelServer = start_server("serve_scripted('demonstrator', None, host='127.0.0.1', port=PORT)")
    return started


def drive(server: ModelServer, bug: Bug, seed: int) -> tuple[list[ModelCall], list[dict[str, str]]]:
    """A rollout by HTTP against the stand-in shell, recorded as the gateway records it."""
    shell, calls = Shell(bug), []
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": bug.issue}]
    while True:
        body = {"messages": messages, "seed": seed, "logprobs": True, "return_token_ids": True, "max_tokens": 300}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
        choice = reply["choices"][0]
        logprobs = [c["logprob"] for c in choice["logprobs"]["content"]]
        calls.append(ModelCall("r", reply["prompt_token_ids"], choice["token_ids"], logprobs, sequence=len(calls)))
        messages = [*messages, {"role": "assistant", "content": choice["message"]["content"]}]
        observation = answer(shell, choice["message"]["content"])
        if observation is None:
            return calls, messages
        messages = [*messages, {"role": "user", "content": observation}]


def test_the_demonstrator_over_http_says_what_it_says_in_the_stand_in(byte_server: ModelServer) -> None:
    for seed in range(6):
        calls, messages = drive(byte_server, BUG, seed)
        assert messages == play(BUG, Demonstrator(), seed)[0]
        assert len(merge(calls)) == 1


@pytest.mark.train
def test_its_recorded_calls_merge_into_the_row_of_the_stand_in(start_server: Any, tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    from swe_lightning.policy.demos import render, row_of

    server = start_server(f"serve_scripted('demonstrator', Path({str(tiny_dir)!r}), host='127.0.0.1', port=PORT)")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    for seed, bug in zip(range(8), bugs(0), strict=False):
        (row,) = merge(drive(server, bug, seed)[0])
        ids = tokenizer.encode(render(tokenizer, play(bug, Demonstrator(), seed)[0]))
        expected = row_of(tokenizer, ids, "r")
        np.testing.assert_array_equal(row.ids, expected.ids)
        np.testing.assert_array_equal(row.mask, expected.mask)
        assert not row.logprobs.any()


@pytest.mark.train
def test_rows_are_masked_on_what_the_demonstrator_said(tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    from swe_lightning.policy.demos import standin_rows

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    for row in standin_rows(tokenizer, 20, 0):
        said = tokenizer.decode(row.ids[row.mask == 1])
        assert all(command_of(part) for part in said.split("<|end|>")[:-1])
        assert said.endswith(f"```bash\n{SUBMIT}\n```<|end|>")
        heard = tokenizer.decode(row.ids[row.mask == 0])
        assert heard.startswith(f"<|system|>{SYSTEM}<|end|><|user|>test_")
        assert "```" not in heard


def test_pause_holds_and_sync_counts_versions(byte_server: ModelServer, tmp_path: Path) -> None:
    byte_server.pause()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{byte_server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}]},
            timeout=httpx.Timeout(10, read=0.3),
        )
    byte_server.sync(tmp_path, 7)
    reply = httpx.post(f"{byte_server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert reply.headers["x-swel-weight-version"] == "7"


def test_a_prompt_that_leaves_no_room_is_a_typed_error(byte_server: ModelServer) -> None:
    url = f"{byte_server.url}/v1/chat/completions"
    reply = httpx.post(url, json={"messages": [{"role": "user", "content": "x" * 40000}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def play_strategy(name: str, bug: Bug, seed: int = 0) -> tuple[list[str], Shell]:
    strategy, shell = make_strategy(name), Shell(bug)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": bug.issue}]
    commands = []
    for _ in range(10):
        reply = strategy.reply(messages, seed)
        commands.append(command_of(reply) or "")
        messages = [*messages, {"role": "assistant", "content": reply}]
        observation = answer(shell, reply)
        if observation is None:
            break
        messages = [*messages, {"role": "user", "content": observation}]
    return commands, shell


def test_noop_submits_at_once() -> None:
    assert play_strategy("noop", BUG)[0] == [SUBMIT]


def test_random_edit_looks_edits_once_and_submits() -> None:
    outcomes = []
    for seed in range(60):
        commands, shell = play_strategy("random_edit", BUG, seed)
        assert (commands[0], commands[2], len(commands)) == (LOOK, SUBMIT, 3)
        outcomes.append(shell.solved)
    assert 0 < sum(outcomes) < 60


def test_enumerate_tries_distinct_edits_until_the_tests_pass() -> None:
    for seed in range(20):
        commands, shell = play_strategy("enumerate", BUG, seed)
        assert shell.solved
        assert commands[-1] == SUBMIT
        assert len(set(commands)) == len(commands) <= 8


def test_replay_gives_the_recorded_replies(tmp_path: Path) -> None:
    file = tmp_path / "replies.json"
    file.write_text(json.dumps(["```bash\nls\n```", "no command here"]))
    assert play_strategy(f"replay:{file}", BUG)[0] == ["ls", ""]


def test_unknown_strategies_and_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no strategy nope; known: demonstrator"):
        make_strategy("nope")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="list of strings"):
        make_strategy(f"replay:{tmp_path / 'bad.json'}")
    with pytest.raises(DataError, match=r"gone\.json"):
        make_strategy(f"replay:{tmp_path / 'gone.json'}")


def test_seed_comes_from_the_request_then_the_user_then_the_issue() -> None:
    messages = [{"role": "user", "content": ISSUE}]
    assert seed_of(0, "u", messages) == 0
    assert seed_of(None, "u", messages) == seed_of(None, "u", []) != seed_of(None, "v", messages)
    assert seed_of(None, None, messages) == seed_of(None, "", messages)


def test_byte_ids_continue_as_an_exact_prefix() -> None:
    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": "é"}]
    first = tokenizer.prompt(messages) + tokenizer.reply("ok ✓")
    later = [*messages, {"role": "assistant", "content": "ok ✓"}, {"role": "user", "content": ""}]
    assert tokenizer.prompt(later)[: len(first)] == first
