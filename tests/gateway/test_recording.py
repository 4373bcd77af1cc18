"""What is asked of the engine and what is believed of its answer: numbered by the reports that taught it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from swe_lightning.gateway import recording
from swe_lightning.gateway.fakes import chat_reply, completion_reply
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.protocols import chat
from swe_lightning.gateway.recording import CHAT, COMPLETION

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def test_g3_g13_everything_is_asked_for_explicitly() -> None:
    body = recording.prepare(HELLO, CHAT, "train", {}).body
    assert (body["logprobs"], body["top_logprobs"], body["return_token_ids"]) == (True, 0, True)
    want = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stream": False}
    assert {k: body[k] for k in want} == want


def test_g15_train_mode_ignores_and_reports_what_bends_the_distribution() -> None:
    client = HELLO | {"temperature": 0.2, "top_p": 0.9, "logit_bias": {"5": 9}, "response_format": {"type": "json"}}
    sent = recording.prepare(client, CHAT, "train", {"temperature": 0.8})
    assert (sent.body["temperature"], sent.body["top_p"]) == (0.8, 1.0)
    assert "logit_bias" not in sent.body
    assert set(sent.sampling["ignored"]) == {"temperature", "top_p", "logit_bias", "response_format"}


def test_val_mode_recipe_over_client_over_neutral() -> None:
    client = HELLO | {"temperature": 0.2, "top_k": 7}
    sent = recording.prepare(client, CHAT, "val", {"temperature": 0.7, "top_p": 0.95, "unknown": 1})
    assert (sent.body["temperature"], sent.body["top_p"], sent.body["top_k"]) == (0.7, 0.95, 7)
    assert "unknown" not in sent.body


def test_the_client_request_is_not_changed() -> None:
    body = HELLO | {"stream": True, "max_completion_tokens": 9, "temperature": 0.1}
    before = copy.deepcopy(body)
    sent = recording.prepare(body, CHAT, "train", {})
    assert body == before
    assert sent.body["max_tokens"] == 9
    assert "max_completion_tokens" not in sent.body
    assert "stream_options" not in sent.body


@pytest.mark.parametrize(
    ("prompt", "ids", "logprobs", "counted", "finish", "reason"),
    [
        ([1], [5, 6], [-1.0, -1.0], 2, "stop", None),
        ([1], [5, 6], [-1.0, -1.0], 9, "stop", "token_loss"),
        ([1], [], [], 2, "stop", "token_loss"),
        (None, [7], [-1.0], 1, "stop", "no_prompt_ids"),
        ([], [7], [-1.0], 1, "stop", "no_prompt_ids"),
        ([1], None, [-1.0], 1, "stop", "no_response_ids"),
        ([1], [], [], 0, "stop", "no_response_ids"),
        ([1], [5, 6, 7], [-1.0, -1.0], 3, "stop", "logprob_len_mismatch"),
        ([1], [5], None, 1, "stop", "logprob_len_mismatch"),
        ([1], [5], [None], 1, "stop", "logprob_len_mismatch"),
        ([1], [5.5], [-1.0], 1, "stop", "no_response_ids"),
        ([1], [-5], [-1.0], 1, "stop", "no_response_ids"),
        ([1], [5], [-1.0], 1, "abort", "aborted"),
    ],
)
@pytest.mark.parametrize("protocol", [CHAT, COMPLETION])
def test_g1_g4_trainable_only_if_ids_logprobs_and_count_agree(
    prompt: Any, ids: Any, logprobs: Any, counted: int, finish: str, reason: str | None, protocol: str
) -> None:
    choice: dict[str, Any] = {"finish_reason": finish, "token_ids": ids}
    reply: dict[str, Any] = {"usage": {"completion_tokens": counted}, "choices": [choice]}
    if protocol == CHAT:
        reply["prompt_token_ids"] = prompt
        choice["logprobs"] = None if logprobs is None else {"content": [{"logprob": v} for v in logprobs]}
    else:
        choice["prompt_token_ids"] = prompt
        choice["logprobs"] = None if logprobs is None else {"token_logprobs": logprobs}
    assert recording.check_reply(reply, protocol, "train").reason == reason


def test_val_calls_are_recorded_but_not_trainable() -> None:
    recorded = recording.check_reply(chat_reply(HELLO), CHAT, "val")
    assert recorded.reason == "val_mode"
    assert recorded.response_ids.size == 3


@pytest.mark.parametrize("reply", [None, [], {}, {"choices": []}, {"choices": [1]}, {"choices": [{}, {}]}])
def test_unreadable_replies_are_a_reason_not_an_exception(reply: Any) -> None:
    assert recording.check_reply(reply, CHAT, "train").reason == "upstream_error"


def test_g3_the_client_sees_only_what_it_asked_for() -> None:
    shown = recording.strip_reply(chat_reply(HELLO), {"model": "gpt-x"}, CHAT)
    assert shown["choices"][0]["logprobs"] is None
    assert "token_ids" not in shown["choices"][0]
    assert "prompt_token_ids" not in shown
    assert shown["model"] == "gpt-x"
    asked = recording.strip_reply(chat_reply(HELLO), {"logprobs": True, "return_token_ids": True}, CHAT)
    assert asked["choices"][0]["logprobs"]["content"]
    assert asked["prompt_token_ids"]
    plain = recording.strip_reply(completion_reply({"prompt": "ab"}), {}, COMPLETION)
    assert "prompt_token_ids" not in plain["choices"][0]
    zero = recording.strip_reply(completion_reply({"prompt": "ab"}), {"logprobs": 0}, COMPLETION)
    assert zero["choices"][0]["logprobs"]


def test_m5_text_and_arguments_survive_byte_for_byte() -> None:
    arguments = '{"a":1,  "b":"\\u00e9\\/"}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    wire = dumps(recording.strip_reply(loads(dumps(chat_reply(HELLO, "é\u2028 x", tool_calls=[call]))), {}, CHAT))
    message = json.loads(wire)["choices"][0]["message"]
    assert message["content"] == "é\u2028 x"
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_lone_surrogates_and_big_integers_pass() -> None:
    assert loads(dumps({"t": "\ud800", "n": 2**70})) == {"t": "\ud800", "n": 2**70}
    with pytest.raises(ValueError, match="JSON"):
        loads(b'{"a": NaN}')


def test_g2_streaming_says_what_the_reply_says() -> None:
    reply = recording.strip_reply(chat_reply(HELLO, "two\nlines"), {}, CHAT)
    wire = chat.events(reply, {"stream": True, "stream_options": {"include_usage": True}}, CHAT).decode()
    *chunks, done, rest = wire.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parsed = [json.loads(c.removeprefix("data: ")) for c in chunks]
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parsed[:-1]) == "two\nlines"
    assert parsed[-2]["choices"][0]["finish_reason"] == "stop"
    assert parsed[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        HELLO | {"n": 2},
        HELLO | {"max_tokens": 0},
        HELLO | {"max_tokens": "9"},
        HELLO | {"max_tokens": True},
    ],
)
def test_bad_requests(body: Any) -> None:
    with pytest.raises(Problem) as e:
        chat.check_request(body, CHAT)
    assert e.value.status == 400


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], 5])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(Problem):
        chat.check_request({"prompt": prompt}, COMPLETION)


@pytest.mark.parametrize(
    ("message", "left"),
    [
        (
            "This model's maximum context length is 100 tokens. However, you requested 140 tokens "
            "(90 in the messages, 50 in the completion). Please reduce the length.",
            10,
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 50. This model's maximum context length is 100 "
            "tokens and your request has 90 input tokens (50 > 100 - 90).",
            10,
        ),
        ("This model's maximum context length is 100 tokens. However, your request has 120 input tokens.", -20),
        ("prompt has 100 tokens, max_context is 100", 0),
        ("messages are odd", None),
    ],
)
def test_g8_space_left_in_the_engines_words(message: str, left: int | None) -> None:
    assert recording.space_left(message) == left
    assert recording.is_overflow(None, message) is (left is not None)


def test_g7_broken_history_is_recognised() -> None:
    def history(arguments: str) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]}

    assert recording.broken_history(history('{"cmd": "ls'))
    assert not recording.broken_history(history('{"cmd": "ls"}'))
    assert not recording.broken_history(HELLO)
