"""Cases of the field that the gateway owns, with their right values; changing a number here is a decision.

G1, G3, G4, G13, G15: test_recording.py, over HTTP test_upstream.py. G2: test_conversations.py. G8: test_upstream.py;
the engines' words for G7 and G8: test_recording.py. G18: test_upstream.py and tests/core/test_doctor.py. W4 over
several gateways: test_several.py. S19 of sandboxes: tests/sandbox; of a whole run: test_run_store.py.
"""

from __future__ import annotations

import asyncio
import http.client as http_client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import psutil
import pytest

from swe_lightning.gateway.client import GatewayClient, join_url
from swe_lightning.gateway.fakes import chat_reply
from swe_lightning.gateway.gate import Gate, GateLimits
from swe_lightning.gateway.problems import Problem
from swe_lightning.records import Outcome
from swe_lightning.trajectory import rows_of

from .conftest import EngineServer, GatewayProcess, ask, code_of, http, until


def answering(turns: list[tuple[list[int], list[int]]]) -> Any:
    """An engine that reports these prompt and response ids, turn by turn."""

    def behaviour(_path: str, body: dict[str, Any]) -> Any:
        prompt, ids = turns.pop(0)
        reply = chat_reply(body)
        reply["prompt_token_ids"], reply["usage"]["completion_tokens"] = prompt, len(ids)
        choice = reply["choices"][0]
        choice["token_ids"], choice["logprobs"] = ids, {"content": [{"logprob": -0.5}] * len(ids)}
        return 200, orjson.dumps(reply), {}

    return behaviour


@pytest.mark.parametrize(
    ("first", "mask"), [([11], [0, 1, 0, 0, 0, 1]), ([11, 99], [0, 1, 1, 0, 0, 1])], ids=["inserted", "sampled"]
)
def test_g6_an_end_token_is_trained_where_it_was_sampled_only(
    gateway: GatewayProcess, engine: EngineServer, first: list[int], mask: list[int]
) -> None:
    engine.engine.behaviour = answering([([10], first), ([10, 11, 99, 198, 12], [13])])
    lease = gateway.lease()
    for text in ("one", "two"):
        assert ask(lease, text).status_code == 200
    (row,) = rows_of(gateway.client.calls(lease.rollout.rollout_id)).rows
    assert (row.ids.tolist(), row.mask.tolist()) == ([10, 11, 99, 198, 12, 13], mask)


def test_g7_a_broken_history_costs_one_call_and_no_earlier_turn(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    assert ask(lease).status_code == 200
    engine.engine.behaviour = lambda _p, _b: (400, b'{"error": {"message": "Unterminated string"}}', {})
    broken = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"cmd": "ls'}}
    refused = ask(lease, messages=[{"role": "assistant", "tool_calls": [broken]}, {"role": "user", "content": "x"}])
    assert (code_of(refused), refused.headers["x-should-retry"]) == ((400, "bad_history"), "false")
    assert len(engine.engine.seen) == 2
    assert len(rows_of(gateway.client.calls(lease.rollout.rollout_id)).rows) == 1


def test_g11_a_client_that_leaves_after_50_ms_ends_its_generation(
    gateway: GatewayProcess, engine: EngineServer
) -> None:
    engine.engine.latency_s = 20
    lease = gateway.lease()
    body, headers = (
        b'{"messages": [{"role": "user", "content": "x"}]}',
        {"authorization": f"Bearer {lease.agent_token}"},
    )
    address = urlsplit(f"{lease.base_url}/chat/completions")
    client = http_client.HTTPConnection(address.netloc)
    client.request("POST", address.path, body, headers)
    until(lambda: engine.engine.active == 1)
    time.sleep(0.05)
    client.close()
    # Under a second where the machine is idle; the limit leaves room for a busy one, and 20 s would be no cancellation.
    until(lambda: engine.engine.cancelled == 1, 5)
    until(lambda: len(gateway.client.calls(lease.rollout.rollout_id)) == 1)
    (call,) = gateway.client.calls(lease.rollout.rollout_id)
    assert (len(engine.engine.seen), call.retries, call.reason, call.trainable) == (1, 0, "aborted", False)
    assert gateway.client.state()["in_flight"] == 0


def test_g11_retries_stop_with_the_client(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.behaviour = lambda _p, _b: (503, b"loading", {})
    lease = gateway.lease()
    headers = {"authorization": f"Bearer {lease.agent_token}"}
    body = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{lease.base_url}/chat/completions", json=body, headers=headers, timeout=0.7)
    until(lambda: len(gateway.client.calls(lease.rollout.rollout_id)) == 1)
    asked = len(engine.engine.seen)
    time.sleep(1.2)  # the gateway's patience is 4 s here
    assert len(engine.engine.seen) == asked
    assert gateway.client.calls(lease.rollout.rollout_id)[0].reason == "aborted"


def test_g12_only_what_the_gateway_saw_sampled_is_trained(gateway: GatewayProcess, engine: EngineServer) -> None:
    """No call, no row and a reason; what a harness wrote in the model's name is context."""
    empty, lease = gateway.lease(), gateway.lease()
    gateway.client.add_event(empty.rollout.rollout_id, 1, "note", {"token_ids": [0]}, token=empty.agent_token)
    gateway.client.report(empty.rollout.rollout_id, 1, Outcome(reward=1.0))
    report = rows_of(gateway.client.calls(empty.rollout.rollout_id))
    assert (report.rows, report.dropped) == ([], {"rollout:no_model_calls": 1})
    written = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "written by the harness"}]
    assert ask(lease, messages=written).status_code == 200
    (row,) = rows_of(gateway.client.calls(lease.rollout.rollout_id)).rows
    (call,) = gateway.client.calls(lease.rollout.rollout_id)
    assert row.mask.tolist() == [0] * len(call.prompt_ids) + [1] * len(call.response_ids)


def test_g17_one_resolver_with_one_slash_for_every_backend(gateway: GatewayProcess) -> None:
    """Local, docker and kubernetes all get the lease's base_url; nothing else joins a gateway's address."""
    assert join_url("http://gw:8080/", "/proxy/x") == join_url("http://gw:8080", "proxy/x") == "http://gw:8080/proxy/x"
    client = GatewayClient(gateway.url + "/", gateway.keyring.mint("control"), agent_url="http://gw:8080/")
    name = gateway.client.create_rollouts([gateway.lease().rollout.model_copy(update={"rollout_id": "g17"})])
    path = f"/proxy/rollout/{name[0].rollout_id}/attempt/1/mode/train/openai/v1"
    assert client.claim("g17", "w").base_url == f"http://gw:8080{path}"
    client.close()


def test_w4_a_call_that_arrives_in_a_sync_waits_and_carries_its_versions(
    gateway: GatewayProcess, engine: EngineServer
) -> None:
    gateway.client.register_model(engine.url, version=4)
    lease = gateway.lease()
    engine.engine.latency_s = 0.5
    with ThreadPoolExecutor(2) as pool:
        before = pool.submit(ask, lease, "before")
        until(lambda: engine.engine.active == 1)
        assert gateway.client.pause(drain_s=30)["in_flight"] == 0
        during = pool.submit(ask, lease, "during")
        until(lambda: gateway.client.state()["waiting"] == 1)
        time.sleep(0.3)
        assert (len(engine.engine.seen), during.done()) == (1, False)
        gateway.client.register_model(engine.url, version=5)
        gateway.client.resume()
        assert [job.result().status_code for job in (before, during)] == [200, 200]
    calls = gateway.client.calls(lease.rollout.rollout_id)
    assert [(c.version_start, c.version_end, c.trainable) for c in calls] == [(4, 4, True), (5, 5, True)]


def test_w4_weights_that_change_under_a_call_make_it_untrainable(gateway: GatewayProcess, engine: EngineServer) -> None:
    """A model registered anew without a pause: the versions at admission and finish differ, and say so."""
    gateway.client.register_model(engine.url, version=7)
    lease = gateway.lease()
    engine.engine.latency_s = 0.5
    thread = threading.Thread(target=ask, args=(lease,))
    thread.start()
    until(lambda: engine.engine.active == 1)
    gateway.client.register_model(engine.url, version=8)
    thread.join()
    (call,) = gateway.client.calls(lease.rollout.rollout_id)
    assert (call.version_start, call.version_end, call.reason) == (7, 8, "mixed_weights")


def test_w8_a_third_session_beyond_a_capacity_of_two_is_429_and_none_is_dropped() -> None:
    async def scenario() -> None:
        gate, leave, served = Gate(GateLimits(max_in_flight=1, max_waiting=1)), asyncio.Event(), list[str]()

        async def session(name: str) -> None:
            async with gate.admit(name):
                served.append(name)
                await leave.wait()

        held = [asyncio.ensure_future(session(name)) for name in ("a", "b")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Problem) as e:
            await session("c")
        assert (e.value.status, e.value.code, gate.refused) == (429, "gateway_busy", 1)
        assert "retry-after" in e.value.headers()
        leave.set()
        await asyncio.gather(*held)
        assert (served, gate.waiting, gate.in_flight) == (["a", "b"], 0, 0)

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_w8_calls_of_one_rollout_beyond_its_limit_are_429_and_the_others_are_answered(
    gateway: GatewayProcess, engine: EngineServer
) -> None:
    lease = gateway.lease()
    gateway.client.pause(drain_s=None)
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(ask, lease, f"{i}") for i in range(3)]  # the limit of the shared gateway
        until(lambda: gateway.client.state()["waiting"] == 3)
        refused = ask(lease, "3")
        assert code_of(refused) == (429, "rollout_busy")
        assert refused.headers["retry-after"] == "1"
        gateway.client.resume()
        assert [job.result().status_code for job in held] == [200] * 3
    assert len(gateway.client.calls(lease.rollout.rollout_id)) == 3


def test_s19_no_secret_in_argv_or_in_what_an_agent_gets(gateway: GatewayProcess) -> None:
    key = (gateway.run / "keys" / "signing.key").read_text().strip()
    process = psutil.Process(gateway.process.pid)
    assert key not in " ".join(process.cmdline())
    assert key not in " ".join(process.environ().values())
    lease = gateway.lease()
    claims = gateway.keyring.verify(lease.agent_token)
    assert (claims.scope, claims.rollout_id, claims.attempt) == ("agent", lease.rollout.rollout_id, 1)
    assert claims.expires_at <= time.time() + lease.rollout.timeout_s + 3601
