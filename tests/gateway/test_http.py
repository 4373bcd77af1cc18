"""The HTTP surface of the real process: scopes, typed refusals, bad input, long polls, what an operator sees."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import httpx
import pytest

from swe_lightning.errors import GatewayError
from swe_lightning.gateway.client import GatewayClient
from swe_lightning.records import InfraReason, Outcome, Rollout

from .conftest import EngineServer, GatewayProcess, ask, code_of, http, until


def control(gateway: GatewayProcess) -> dict[str, str]:
    return {"authorization": f"Bearer {gateway.keyring.mint('control')}"}


def test_a_rollout_from_creation_to_reward(gateway: GatewayProcess) -> None:
    lease = gateway.lease(task={"instance_id": "t"}, config={"sampling": {"temperature": 0.5}})
    first = ask(lease, "hi")
    assert first.status_code == 200
    assert first.json()["choices"][0]["logprobs"] is None
    second = ask(lease, messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}])
    assert second.status_code == 200
    calls = gateway.client.calls(lease.rollout.rollout_id)
    assert [c.sequence for c in calls] == [2, 3]
    assert [c.trainable for c in calls] == [True, True]
    assert calls[0].sampling["temperature"] == 0.5
    assert (calls[0].version_start, calls[0].version_end) == (1, 1)
    whole = [*calls[0].prompt_ids, *calls[0].response_ids]
    assert calls[1].prompt_ids[: len(whole)].tolist() == whole
    ended = gateway.client.report(lease.rollout.rollout_id, 1, Outcome(reward=1.0), token=lease.grade_token)
    assert (ended.state, ended.weight_versions) == ("succeeded", [1])
    kinds = [e["kind"] for e in gateway.client.events(lease.rollout.rollout_id)]
    assert kinds == ["claimed", "model_call", "model_call", "reward"]


def test_the_agent_token_only_asks_the_model(gateway: GatewayProcess) -> None:
    """Everything else is 403 and says which scope is missing."""
    mine, other = gateway.lease(), gateway.lease()
    agent = {"authorization": f"Bearer {mine.agent_token}"}
    name, foreign = mine.rollout.rollout_id, other.rollout.rollout_id
    reward = {"type": "reward", "outcome": {"reward": 1.0}}
    attempts: list[tuple[str, str, Any, str]] = [
        ("GET", "/api/rollouts", None, "control"),
        ("GET", f"/api/rollouts/{name}", None, "control or grade"),
        ("GET", f"/api/rollouts/{name}/events", None, "control"),
        ("GET", "/api/rollouts/terminal", None, "control"),
        ("POST", "/api/rollouts", {"rollouts": []}, "control"),
        ("PATCH", f"/api/rollouts/{name}", {"state": "failed"}, "control"),
        ("POST", f"/api/rollouts/{name}/attempt/1/events", reward, "grade or control"),
        ("POST", f"/api/rollouts/{foreign}/attempt/1/events", {"type": "note"}, foreign),
        ("POST", "/proxy/pause", {}, "control"),
        ("POST", "/proxy/resume", {}, "control"),
        ("GET", "/proxy/state", None, "control"),
        ("GET", "/metrics", None, "control"),
        ("POST", "/api/models", {"url": "http://evil"}, "control"),
        ("DELETE", "/api/models?url=x", None, "control"),
    ]
    for method, path, body, scope in attempts:
        response = http.request(method, gateway.url + path, json=body, headers=agent)
        assert code_of(response) == (403, "missing_scope"), path
        assert scope in response.json()["error"]["message"], path
    assert code_of(ask(other, token=mine.agent_token)) == (403, "missing_scope")
    assert gateway.client.add_event(name, 1, "note", {"x": 1}, token=mine.agent_token) == 2
    assert gateway.client.get_rollout(name).state == "running"


def test_grade_reads_and_rewards_its_own_attempt_only(gateway: GatewayProcess) -> None:
    mine, other = gateway.lease(), gateway.lease()
    grade = {"authorization": f"Bearer {mine.grade_token}"}
    name, foreign = mine.rollout.rollout_id, other.rollout.rollout_id
    assert http.get(f"{gateway.url}/api/rollouts/{name}", headers=grade).status_code == 200
    assert http.get(f"{gateway.url}/api/rollouts/{foreign}", headers=grade).status_code == 403
    assert code_of(ask(mine, token=mine.grade_token)) == (403, "missing_scope")
    with pytest.raises(GatewayError, match="missing_scope"):
        gateway.client.report(foreign, 1, Outcome(reward=1.0), token=mine.grade_token)


def test_bad_tokens(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    bound = {"rollout_id": lease.rollout.rollout_id, "attempt": 1}
    expired = gateway.keyring.mint("agent", **bound, ttl_s=-1)
    head, payload, signature = lease.agent_token.split(".")
    assert code_of(ask(lease, token=expired)) == (401, "token_expired")
    assert code_of(ask(lease, token=f"{head}.{payload}.{signature[::-1]}")) == (401, "token_invalid")
    assert code_of(ask(lease, token="")) == (401, "token_missing")
    wrong_attempt = gateway.keyring.mint("agent", rollout_id=lease.rollout.rollout_id, attempt=2)
    assert code_of(ask(lease, token=wrong_attempt)) == (403, "missing_scope")
    with pytest.raises(GatewayError, match="token_invalid"):
        GatewayClient(gateway.url, "nonsense").state()


def test_late_calls_and_reports_are_refused_and_counted(gateway: GatewayProcess) -> None:
    client, lease = gateway.client, gateway.lease()
    name = lease.rollout.rollout_id
    before = client.state()["late"]
    client.release(name, 1, InfraReason.WORKER_LOST, "gone")
    second = client.claim(name, "other")
    client.report(name, 2, Outcome(reward=0.0), token=second.grade_token)
    assert code_of(ask(lease)) == (409, "rollout_ended")
    assert code_of(ask(second)) == (409, "rollout_ended")
    assert ask(second).headers["x-should-retry"] == "false"
    with pytest.raises(GatewayError) as e:
        client.report(name, 1, Outcome(reward=1.0), token=lease.grade_token)
    assert (e.value.status, e.value.code) == (409, "rollout_ended")
    rollout = client.get_rollout(name)
    assert rollout.outcome is not None
    assert (rollout.state, rollout.attempt, rollout.outcome.reward) == ("succeeded", 2, 0.0)
    after = client.state()["late"]
    assert (after["calls"] - before["calls"], after["reports"] - before["reports"]) == (3, 1)


def test_a_call_in_flight_when_its_rollout_ends_is_not_recorded(gateway: GatewayProcess, engine: EngineServer) -> None:
    engine.engine.latency_s = 1.0
    lease = gateway.lease()
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(lease)))
    thread.start()
    until(lambda: engine.engine.active == 1)
    gateway.client.report(lease.rollout.rollout_id, 1, Outcome(reward=0.0))
    thread.join()
    assert code_of(answers[0]) == (409, "rollout_ended")
    assert gateway.client.calls(lease.rollout.rollout_id) == []


def test_a_held_call_whose_rollout_ends_never_reaches_the_engine(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    gateway.client.pause(drain_s=None)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(lease)))
    thread.start()
    until(lambda: gateway.client.state()["waiting"] == 1)
    gateway.client.cancel([lease.rollout.rollout_id])
    gateway.client.resume()
    thread.join()
    assert code_of(answers[0]) == (409, "rollout_ended")
    assert engine.engine.seen == []


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "bad_json"),
        (b"", 400, "bad_json"),
        (b"\xff\xfe", 400, "bad_json"),
        (b"[1]", 400, "bad_request"),
        (b'"x"', 400, "bad_request"),
        (b"[" * 50_000, 400, "bad_json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 3}', 400, "bad_request"),
        (b"x" * (65 * 2**20), 413, "body_too_large"),
    ],
    ids=["torn", "empty", "bytes", "list", "string", "deep", "n", "huge"],
)
def test_bad_bodies(gateway: GatewayProcess, content: bytes, status: int, code: str) -> None:
    lease = gateway.lease()
    headers = {"authorization": f"Bearer {lease.agent_token}"}
    response = http.post(f"{lease.base_url}/chat/completions", content=content, headers=headers, timeout=30)
    assert code_of(response) == (status, code)


def test_path_tricks(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    name = lease.rollout.rollout_id
    base = f"/proxy/rollout/{name}/attempt/1/mode/train/openai/v1"
    headers = {"authorization": f"Bearer {lease.agent_token}"}
    for path in (
        f"{base}/embeddings",
        f"{base}//chat/completions",
        f"{base}/chat/completions/",
        f"{base}/chat/completions%0Ax",
        f"{base}/../v1/chat/completions/x",
        base.replace("/1/", "/one/") + "/chat/completions",
        base.replace("/1/", "/-1/") + "/chat/completions",
        base.replace("/1/", "/01/") + "/chat/completions",
        base.replace("train", "fast") + "/chat/completions",
        f"/proxy/rollout/{name}",
        "/proxy/rollout/",
        "/nothing",
    ):
        response = http.post(gateway.url + path, json={}, headers=headers)
        assert code_of(response) == (404, "unknown_path"), path
    encoded = f"/proxy/rollout/x%2f..%2f{name}/attempt/1/mode/train/openai/v1/chat/completions"
    assert http.post(gateway.url + encoded, json={}, headers=headers).status_code in (403, 404)
    assert http.get(gateway.url + base + "/chat/completions", headers=headers).status_code == 405
    val = http.post(gateway.url + base.replace("train", "val") + "/chat/completions", json={}, headers=headers)
    assert code_of(val) == (403, "wrong_mode")


def test_unknown_rollouts_and_fields(gateway: GatewayProcess) -> None:
    head = control(gateway)
    agent = gateway.keyring.mint("agent", rollout_id="nobody", attempt=1)
    path = f"{gateway.url}/proxy/rollout/nobody/attempt/1/mode/train/openai/v1/chat/completions"
    assert code_of(http.post(path, json={}, headers={"authorization": f"Bearer {agent}"})) == (404, "unknown_rollout")
    for method, route, body in [
        ("GET", "/api/rollouts/nobody", None),
        ("GET", "/api/rollouts/nobody/events", None),
        ("PATCH", "/api/rollouts/nobody", {"state": "running"}),
        ("PATCH", "/api/rollouts/nobody", {"state": "failed"}),
        ("POST", "/api/rollouts/nobody/attempt/1/events", {"type": "reward", "outcome": {"reward": 1}}),
    ]:
        response = http.request(method, gateway.url + route, json=body, headers=head)
        assert code_of(response) == (404, "unknown_rollout"), route
    new = {"rollout_id": "ok", "group_id": "g"}
    for changed in ({"x": 1}, {"rollout_id": "a/b"}, {"rollout_id": "../x"}, {"mode": "test"}, {"max_attempts": 0}):
        body = {"rollouts": [new | changed]}
        assert code_of(http.post(f"{gateway.url}/api/rollouts", json=body, headers=head)) == (422, "bad_request")
    misspelt = http.get(f"{gateway.url}/api/rollouts?status=running", headers=head)
    assert code_of(misspelt) == (422, "bad_request")
    wrong = http.put(f"{gateway.url}/api/rollouts", headers=head)
    assert code_of(wrong) == (405, "wrong_method")


def test_reserved_event_types_cannot_be_forged(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    path = f"{gateway.url}/api/rollouts/{lease.rollout.rollout_id}/attempt/1/events"
    headers = {"authorization": f"Bearer {lease.agent_token}"}
    for kind in ("model_call", "claimed", "released", "cancelled"):
        assert code_of(http.post(path, json={"type": kind}, headers=headers)) == (422, "bad_request")
    sneaky = {"type": "note", "outcome": {"reward": 1.0}}
    assert code_of(http.post(path, json=sneaky, headers=headers)) == (422, "bad_request")


def test_control_calls_are_idempotent(gateway: GatewayProcess) -> None:
    client, name = gateway.client, f"r-{uuid.uuid4().hex}"
    new = Rollout(rollout_id=name, group_id="g", task={"a": 1})
    assert client.create_rollouts([new]) == client.create_rollouts([new])
    with pytest.raises(GatewayError) as e:
        client.create_rollouts([new.model_copy(update={"task": {"a": 2}})])
    assert (e.value.status, e.value.code) == (409, "rollout_differs")
    client.cancel([name])
    client.cancel([name])
    assert [e["kind"] for e in client.events(name)] == []
    assert client.get_rollout(name).outcome == Outcome(infra_reason=InfraReason.CANCELLED, message="cancelled")
    lease = gateway.lease()
    client.report(lease.rollout.rollout_id, 1, Outcome(reward=1.0))
    client.cancel([lease.rollout.rollout_id])
    assert client.get_rollout(lease.rollout.rollout_id).state == "succeeded"


def test_every_row_of_the_page_on_repetition(gateway: GatewayProcess) -> None:
    """What the operator's page says of a request that is sent twice, with its id and without."""
    head, name = control(gateway), f"r-{uuid.uuid4().hex}"

    def send(method: str, path: str, body: Any) -> httpx.Response:
        return http.request(method, gateway.url + path, json=body, headers=head)

    new = {"rollouts": [{"group_id": name}]}
    first, second = (send("POST", "/api/rollouts", new).json()["rollouts"][0]["rollout_id"] for _ in range(2))
    assert first != second
    one, events = f"/api/rollouts/{first}", f"/api/rollouts/{first}/attempt/1/events"
    claim = {"state": "running", "claim_id": "c"}
    tries = [send("PATCH", one, claim).json()["rollout"]["attempt"] for _ in range(2)]
    assert tries == [1, 1]
    assert code_of(send("PATCH", one, {"state": "running"})) == (409, "not_queuing")
    note = {"type": "note", "data": {"a": 1}}
    assert [send("POST", events, note).json()["sequence"] for _ in range(2)] == [2, 3]
    named = [note | {"event_id": "e", "data": {"n": n}} for n in (1, 2)]
    assert [send("POST", events, body).json()["sequence"] for body in named] == [4, 4]
    release = {"state": "queuing", "attempt": 1, "event_id": "gone"}
    for _ in range(2):
        assert send("PATCH", one, release).json()["rollout"]["state"] == "queuing"
    assert code_of(send("PATCH", one, release | {"event_id": ""})) == (409, "rollout_ended")
    assert send("PATCH", one, claim).json()["rollout"]["attempt"] == 2, "an id may come again in the next attempt"
    assert send("POST", events.replace("/1/", "/2/"), named[0]).json()["sequence"] == 2
    reward = {"type": "reward", "outcome": {"reward": 0.5}, "event_id": "end"}
    for _ in range(2):
        assert send("POST", events.replace("/1/", "/2/"), reward).json()["rollout"]["state"] == "succeeded"
    assert code_of(send("POST", events.replace("/1/", "/2/"), reward | {"event_id": ""})) == (409, "rollout_ended")


def test_an_agents_event_cannot_take_the_place_of_a_report(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    name = lease.rollout.rollout_id
    path = f"{gateway.url}/api/rollouts/{name}/attempt/1/events"

    def post(token: str, **body: Any) -> httpx.Response:
        return http.post(path, json=body | {"event_id": "verdict"}, headers={"authorization": f"Bearer {token}"})

    assert post(lease.agent_token, type="note").status_code == 201
    assert post(lease.grade_token, type="reward", outcome={"reward": 0.25}).json()["rollout"]["state"] == "succeeded"
    assert [(e["kind"], e["event_id"]) for e in gateway.client.events(name)[1:]] == [
        ("note", "verdict"),
        ("reward", "verdict"),
    ]


def test_long_polls_wake_on_the_commit(gateway: GatewayProcess) -> None:
    client, name = gateway.client, f"r-{uuid.uuid4().hex}"
    _, cursor = client.terminal()
    while client.terminal(after=cursor)[0]:
        _, cursor = client.terminal(after=cursor)
    found: dict[str, Any] = {}

    def wait_queuing() -> None:
        found["queuing"] = client.list_rollouts(state="queuing", group_id=name, wait_s=20)

    def wait_terminal() -> None:
        found["terminal"] = client.terminal(after=cursor, wait_s=20)

    threads = [threading.Thread(target=wait_queuing), threading.Thread(target=wait_terminal)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    client.create_rollouts([Rollout(rollout_id=name, group_id=name)])
    threads[0].join()  # else a claim could come before the poll has looked again
    client.claim(name, "w")
    client.report(name, 1, Outcome(reward=0.5))
    threads[1].join()
    assert time.monotonic() - started < 10
    assert [r.rollout_id for r in found["queuing"]] == [name]
    assert [r.rollout_id for r in found["terminal"][0]] == [name]
    assert found["terminal"][1] == cursor + 1
    assert client.list_rollouts(state="queuing", group_id="nothing", wait_s=0.2) == []


def test_spellings_of_an_attempt_go_with_it(gateway: GatewayProcess) -> None:
    lease = gateway.lease()
    before = gateway.client.state()["tables"]["spellings"]
    url = lease.base_url.replace("/openai/v1", "/anthropic/v1/messages")
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    assert http.post(url, json=body, headers={"x-api-key": lease.agent_token}).status_code == 200
    assert gateway.client.state()["tables"]["spellings"] == before + 1
    gateway.client.report(lease.rollout.rollout_id, 1, Outcome(reward=1.0))
    until(lambda: gateway.client.state()["tables"]["spellings"] == before)


def test_metrics_and_health(gateway: GatewayProcess) -> None:
    ask(gateway.lease())
    assert http.get(f"{gateway.url}/healthz").json() == {"status": "ok"}
    text = http.get(f"{gateway.url}/metrics", headers=control(gateway)).text
    assert 'swel_gateway_calls_total{result="ok"}' in text
    assert 'swel_gateway_rollouts{state="running"}' in text
    paths = http.get(f"{gateway.url}/openapi.json").json()["paths"]
    assert "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events" in paths


def test_the_engine_hears_the_rollout_of_the_path_as_user(gateway: GatewayProcess, engine: EngineServer) -> None:
    lease = gateway.lease()
    assert ask(lease, user="somebody-else").status_code == 200
    assert engine.engine.seen[-1]["user"] == lease.rollout.rollout_id
