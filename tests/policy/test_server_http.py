"""The embedded server as a process, over HTTP: reply layout, limits, controls, and clients that go away."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from swe_lightning.errors import BusyError, UpstreamError
from swe_lightning.policy.server import serve
from swe_lightning.policy.sync import ModelServer

pytest.importorskip("torch")
pytestmark = pytest.mark.train

MESSAGES = [{"role": "system", "content": "Fix the bug with bash."}, {"role": "user", "content": "test_a fails."}]
ASK = {"messages": MESSAGES, "max_tokens": 8, "logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tiny_dir: Path, start_server: Any) -> ModelServer:
    """Context of 400 tokens, so that limits are near."""
    started: ModelServer = start_server(
        f"serve(model_dir=Path({str(tiny_dir)!r}), host='127.0.0.1', port=PORT, version=3, max_context=400)"
    )
    return started


def chat(server: ModelServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=ASK | body, timeout=60)


def test_reply_carries_the_ids_that_were_fed_and_sampled(server: ModelServer, tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    reply = chat(server, seed=1, ignore_eos=True)
    data, choice = reply.json(), reply.json()["choices"][0]
    fed = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert data["prompt_token_ids"] == fed
    assert len(choice["token_ids"]) == data["usage"]["completion_tokens"] == 8
    assert data["usage"]["prompt_tokens"] == len(fed)
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    content = choice["logprobs"]["content"]
    assert [c["token"] for c in content] == [tokenizer.decode([i]) for i in choice["token_ids"]]
    assert all(c["logprob"] < 0 and c["top_logprobs"] == [] for c in content)
    assert choice["finish_reason"] == "length"
    assert reply.headers["x-swel-weight-version"] == "3"


def test_extras_come_only_when_asked_for(server: ModelServer) -> None:
    data = chat(server, logprobs=False, return_token_ids=False).json()
    assert "prompt_token_ids" not in data
    assert "token_ids" not in data["choices"][0]
    assert data["choices"][0]["logprobs"] is None


def test_the_official_client_understands_it(server: ModelServer) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=4, logprobs=True)  # type: ignore[call-overload]
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert [m.id for m in client.models.list()] == ["policy"]
    with pytest.raises(openai.BadRequestError, match="400"):
        client.completions.create(model="policy", prompt="x " * 500)


def test_text_completions_continue_given_ids(server: ModelServer) -> None:
    ids = chat(server).json()["prompt_token_ids"]
    body = {"prompt": ids, "max_tokens": 5, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids
    same = chat(server, temperature=0, max_tokens=5).json()["choices"][0]
    assert choice["token_ids"] == same["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([c["logprob"] for c in same["logprobs"]["content"]])


def test_several_choices_and_stop_strings(server: ModelServer) -> None:
    data = chat(server, n=3, seed=5, ignore_eos=True).json()
    assert [c["index"] for c in data["choices"]] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in data["choices"]}) == 3
    text = chat(server, seed=6, ignore_eos=True, max_tokens=40).json()["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:2]
    choice = chat(server, seed=6, ignore_eos=True, max_tokens=40, stop=stop).json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_end_token_is_sampled_reported_and_not_shown(server: ModelServer, tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(tiny_dir).eos_token_id
    choices = chat(server, seed=0, max_tokens=300, n=64).json()["choices"]
    choice = next(c for c in choices if c["finish_reason"] == "stop")
    assert choice["token_ids"][-1] == end
    assert end not in choice["token_ids"][:-1]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert "<|end|>" not in choice["message"]["content"]


def test_sampled_tokens_are_clamped_to_the_room_left(server: ModelServer) -> None:
    used = chat(server, messages=[{"role": "user", "content": "9" * 380}], ignore_eos=True, max_tokens=200).json()
    assert used["usage"]["total_tokens"] == 400
    full = chat(server, messages=[{"role": "user", "content": "9" * 397}])
    error = full.json()["error"]
    assert full.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert (error["prompt_tokens"], error["max_context"]) == (400, 400)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": []}, "invalid_messages"),
        ({"messages": [{"content": "x"}]}, "invalid_messages"),
        ({"temperature": -1}, "invalid_parameter"),
        ({"max_tokens": 0}, "invalid_parameter"),
        ({"top_p": 1.5}, "invalid_parameter"),
        ({"frequency_penalty": 0.5}, "unsupported_parameter"),
        ({"repetition_penalty": 1.05}, "unsupported_parameter"),
        ({"stream": True}, "unsupported_parameter"),
        ({"top_logprobs": 3}, "unsupported_parameter"),
    ],
)
def test_what_would_change_the_distribution_silently_is_refused(
    server: ModelServer, body: dict[str, Any], code: str
) -> None:
    reply = chat(server, **body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_broken_bodies_and_unknown_paths_get_error_bodies(server: ModelServer) -> None:
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{nope").json()["error"]["code"] == "invalid_json"
    assert httpx.post(url, content=b"[1]").json()["error"]["code"] == "invalid_json"
    assert httpx.get(url).status_code == 405
    assert httpx.get(f"{server.url}/nope").status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [10**6]}).status_code == 400


def test_later_turns_reuse_the_prefix_over_http(server: ModelServer) -> None:
    first = chat(server, messages=[{"role": "user", "content": "something quite unlike the others"}], seed=2)
    choice = first.json()["choices"][0]
    messages = [
        {"role": "user", "content": "something quite unlike the others"},
        {"role": "assistant", "content": choice["message"]["content"]},
        {"role": "user", "content": "and on"},
    ]
    second = chat(server, messages=messages)
    assert int(second.headers["x-swel-reused-tokens"]) >= len(first.json()["prompt_token_ids"])


def test_a_request_that_comes_while_paused_waits_and_is_answered(server: ModelServer) -> None:
    server.pause()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(chat, server)
        time.sleep(0.5)
        assert not held.done()
        assert server.health()["waiting"] == 1
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
        server.resume()
        assert held.result(timeout=20).status_code == 200


def test_a_client_that_leaves_stops_its_sequence(server: ModelServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json=ASK | {"max_tokens": 380, "ignore_eos": True, "n": 64},
            timeout=httpx.Timeout(30, read=0.02),
        )
    end = time.monotonic() + 5
    while server.health()["running"] or server.health()["waiting"]:
        assert time.monotonic() < end, "the sequences of a client that left are still running"
        time.sleep(0.01)


def test_a_trainer_that_dies_while_pausing_leaves_the_server_alive(server: ModelServer) -> None:
    url = f"{server.url}/v1/chat/completions"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(httpx.post, url, json=ASK | {"max_tokens": 380, "ignore_eos": True, "n": 32}, timeout=60)
        while not server.health()["running"]:
            time.sleep(0.005)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/pause", timeout=httpx.Timeout(30, read=0.02))
        assert running.result(timeout=60).status_code == 200
    server.pause()
    server.resume()
    assert chat(server).status_code == 200


def test_sync_loads_new_weights_and_refuses_another_order(server: ModelServer, tiny_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    before = chat(server, temperature=0).json()["choices"][0]["token_ids"]
    save_file(
        {k: v.flip(0) for k, v in load_file(tiny_dir / "model.safetensors").items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UpstreamError, match=r"409.*pause before loading"):
        server.load_weights(tmp_path, 4)
    server.sync(tmp_path, 4)
    reply = chat(server, temperature=0)
    assert reply.headers["x-swel-weight-version"] == "4"
    assert reply.json()["choices"][0]["token_ids"] != before
    server.pause()
    server.load_weights(tiny_dir, 5)
    with pytest.raises(UpstreamError, match=r"409.*reset_prefix_cache"):
        server.resume()
    server.reset_prefix_cache()
    server.resume()
    assert chat(server, temperature=0).json()["choices"][0]["token_ids"] == before


def test_a_failed_load_tells_the_servers_own_words(server: ModelServer, tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match=r"no model\.safetensors"):
        server.sync(tmp_path, 9)
    server.resume()
    assert chat(server).status_code == 200


class _Recorder(BaseHTTPRequestHandler):
    """Stands for any model server: remembers the calls, fails or stalls where told."""

    seen: ClassVar[list[str]] = []
    fail = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.seen.append(self.path)
        if self.fail == self.path:
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"boom")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"success": false}' if self.fail == "reset" else b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Any:
    _Recorder.seen, _Recorder.fail = [], ""
    http = HTTPServer(("127.0.0.1", 0), _Recorder)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield ModelServer(f"http://127.0.0.1:{http.server_port}/", timeout_s=5), _Recorder
    http.shutdown()
    http.server_close()


def test_sync_is_pause_load_reset_resume_in_that_order(recorder: Any, tmp_path: Path) -> None:
    server, record = recorder
    server.sync(tmp_path, 1)
    assert record.seen == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize(("fail", "match"), [("/collective_rpc", "500: boom"), ("reset", "refused")])
def test_a_step_that_fails_ends_the_sync_before_resume(recorder: Any, tmp_path: Path, fail: str, match: str) -> None:
    server, record = recorder
    record.fail = fail
    with pytest.raises(UpstreamError, match=match):
        server.sync(tmp_path, 1)
    assert "/resume" not in record.seen


def test_an_absent_server_is_an_upstream_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamError, match="health"):
            ModelServer(f"http://127.0.0.1:{unused.getsockname()[1]}").wait_healthy(0.1)


def test_a_port_in_use_is_one_clear_sentence(tiny_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BusyError, match=f"127.0.0.1:{port}.*choose another port"):
            serve(model_dir=tiny_dir, host="127.0.0.1", port=port)
