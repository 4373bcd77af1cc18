"""A harness inside a box holds an agent token and a route to the gateway. What else can be had with the two?

The gateway is the real process, the box is real, and each attack is made by plain HTTP from inside. Where nothing
changed is asserted on the gateway, not on what the attacker was told.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swe_lightning.gateway.client import Lease
from swe_lightning.records import Task
from swe_lightning.sandbox import Backend, Sandbox
from swe_lightning.sandbox.local import LocalBackend
from swe_lightning.sandbox.network import GATEWAY_PORT, GATEWAY_URL
from swe_lightning.sandbox.trees import agent_tree
from swe_lightning.services import Service

from ..gateway.conftest import EngineServer, GatewayProcess, running
from .conftest import LIMITS

Ask = Callable[..., list[tuple[int, str]]]

CLIENT = """
import http.client, json, sys
for method, path, body, token in json.loads(sys.argv[1]):
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=20)
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = "Bearer " + token
    connection.putrequest(method, path, skip_host=False)
    data = json.dumps(body).encode() if body is not None else b""
    for key, value in {**headers, "content-length": str(len(data))}.items():
        connection.putheader(key, value)
    connection.endheaders(data)
    reply = connection.getresponse()
    print(json.dumps([reply.status, reply.read(2000).decode(errors="replace")]))
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    engine = EngineServer()
    with running(tmp_path_factory.mktemp("run")) as gateway:
        gateway.client.register_model(engine.url, version=1)
        yield gateway
    engine.stop()


@pytest.fixture
def lease(gateway: GatewayProcess) -> Lease:
    return gateway.lease()


@pytest.fixture
def inside(backend: Backend, task: Task, gateway: GatewayProcess, lease: Lease) -> Iterator[Sandbox]:
    """A box as a harness inside has it: the token in its environment, the route, nothing else."""
    env = {"OPENAI_API_KEY": lease.agent_token, "OPENAI_BASE_URL": own_url(lease)}
    route = Service("127.0.0.1", gateway.port)
    with backend.create(agent_tree(task, show_tests=False), limits=LIMITS, env=env, gateway=route) as box:
        yield box


@pytest.fixture
def ask(inside: Sandbox) -> Ask:
    """Requests made inside: (method, path, body, token) -> (status, text) each."""

    def ask(*requests: tuple[str, str, Any, str]) -> list[tuple[int, str]]:
        command = f"python - '{json.dumps(requests)}' <<'END'\n{CLIENT}\nEND"
        said = inside.run(command, timeout_s=60).output.decode()
        return [tuple(json.loads(line)) for line in said.splitlines()]

    return ask


def own_url(lease: Lease) -> str:
    return GATEWAY_URL + "/" + lease.base_url.split("/", 3)[3]


def model_path(lease: Lease) -> str:
    return "/" + lease.base_url.split("/", 3)[3] + "/chat/completions"


HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_its_own_model_path_works(inside: Sandbox, ask: Ask, lease: Lease) -> None:
    """Else every refusal below would prove nothing."""
    (status, text) = ask(("POST", model_path(lease), HELLO, lease.agent_token))[0]
    assert status == 200
    assert json.loads(text)["choices"][0]["message"]["content"] == "ok"
    shell = "python -c \"import os; print(os.environ['OPENAI_BASE_URL'])\""
    assert inside.run(shell, timeout_s=5).output.decode().strip() == f"http://127.0.0.1:{GATEWAY_PORT}" + model_path(
        lease
    ).removesuffix("/chat/completions")


SDK = """
import openai
client = openai.OpenAI()
hello = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
print(client.chat.completions.create(**hello).choices[0].message.content)
stream = client.chat.completions.create(**hello, stream=True)
print("".join(c.choices[0].delta.content or "" for c in stream if c.choices))
"""


def test_a_stock_client_inside_needs_nothing_but_its_environment(
    able: None, gateway: GatewayProcess, lease: Lease, task: Task
) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment with the openai package to show to a box")
    pytest.importorskip("openai", reason="the dev extra brings openai")
    env = {"OPENAI_API_KEY": lease.agent_token, "OPENAI_BASE_URL": own_url(lease)}
    backend = LocalBackend(env_dir=Path(sys.prefix))
    try:
        route, limits = Service("127.0.0.1", gateway.port), replace(LIMITS, memory_mb=1024)
        with backend.create(agent_tree(task, show_tests=False), limits=limits, env=env, gateway=route) as box:
            result = box.run(f"python - <<'END'\n{SDK}\nEND", timeout_s=120)
    finally:
        backend.close()
    assert result.output.decode() == "ok\nok\n"
    assert len(gateway.client.calls(lease.rollout.rollout_id)) == 2


def control_calls(rollout: str, attempt: int) -> list[tuple[str, str, Any]]:
    solved = {"type": "reward", "outcome": {"reward": 1.0}}
    return [
        ("GET", "/api/rollouts", None),
        ("POST", "/api/rollouts", {"rollouts": [{"group_id": "g", "task": {}}]}),
        ("GET", f"/api/rollouts/{rollout}", None),
        ("GET", f"/api/rollouts/{rollout}/events", None),
        ("GET", f"/api/rollouts/{rollout}/events?calls=plain", None),
        ("PATCH", f"/api/rollouts/{rollout}", {"state": "failed", "message": "x"}),
        ("PATCH", f"/api/rollouts/{rollout}", {"state": "running", "worker": "me", "claim_id": "c"}),
        ("GET", "/api/rollouts/terminal", None),
        ("POST", f"/api/rollouts/{rollout}/attempt/{attempt}/events", solved),
        ("POST", f"/api/rollouts/{rollout}/attempt/{attempt}/events", {**solved, "type": "note"}),
        ("GET", "/api/models", None),
        ("POST", "/api/models", {"url": "http://127.0.0.1:1", "version": 9}),
        ("DELETE", "/api/models?url=x", None),
        ("POST", "/proxy/pause", None),
        ("POST", "/proxy/resume", None),
        ("GET", "/metrics", None),
    ]


def test_no_control_endpoint_answers_an_agent_token(gateway: GatewayProcess, ask: Ask, lease: Lease) -> None:
    calls = control_calls(lease.rollout.rollout_id, lease.rollout.attempt)
    before = ([m["url"] for m in gateway.client.models()], gateway.client.get_rollout(lease.rollout.rollout_id))
    for token in (lease.agent_token, "", "x"):
        answers = ask(*[(*call, token) for call in calls])
        assert len(answers) == len(calls)
        refused = {call[:2]: status for call, (status, _) in zip(calls, answers, strict=True)}
        assert [call for call, status in refused.items() if status not in (401, 403, 422)] == [], token
        assert all(status != 422 or "events" in call[1] for call, status in refused.items())
    assert ([m["url"] for m in gateway.client.models()], gateway.client.get_rollout(lease.rollout.rollout_id)) == before


@pytest.mark.parametrize("what", ["rollout", "attempt", "mode", "traversal", "encoded", "double slash"])
def test_another_rollouts_model_path_is_closed(gateway: GatewayProcess, ask: Ask, lease: Lease, what: str) -> None:
    other = gateway.lease()
    own, foreign = model_path(lease), model_path(other)
    attempt = lease.rollout.attempt
    path = {
        "rollout": foreign,
        "attempt": own.replace(f"/attempt/{attempt}/", f"/attempt/{attempt + 1}/"),
        "mode": own.replace("/mode/train/", "/mode/val/"),
        "traversal": own.removesuffix("/chat/completions") + "/../../../../../../../../.." + foreign,
        "encoded": own.removesuffix("/chat/completions") + "/%2e%2e" * 9 + foreign,
        "double slash": "/" + foreign,
    }[what]
    assert path != own
    ((status, _),) = ask(("POST", path, HELLO, lease.agent_token))
    assert status in (400, 401, 403, 404, 405), what
    assert gateway.client.calls(other.rollout.rollout_id) == []


def test_tokens_cannot_be_forged(gateway: GatewayProcess, ask: Ask, lease: Lease) -> None:
    head, body, signature = lease.agent_token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    control = {"scope": "control", "iat": 1, "exp": int(time.time()) + 9999}
    forged = {
        "no algorithm": f"{b64({'alg': 'none', 'typ': 'JWT'})}.{b64(control)}.",
        "other claims, same signature": f"{head}.{b64({**claims, 'scope': 'control'})}.{signature}",
        "graded by itself": f"{head}.{b64({**claims, 'scope': 'grade'})}.{signature}",
        "guessed key": signed(head, control, b"secret"),
        "the token as the key": signed(head, control, lease.agent_token.encode()),
        "empty key": signed(head, control, b""),
    }
    answers = ask(*[("GET", "/api/rollouts", None, token) for token in forged.values()])
    assert [status for status, _ in answers] == [401] * len(forged)
    own = gateway.keyring.mint("control")
    assert ask(("GET", "/api/rollouts", None, own))[0][0] == 200  # the request itself is right


def b64(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def signed(head: str, claims: dict[str, Any], key: bytes) -> str:
    text = f"{head}.{b64(claims)}"
    mac = hmac.new(key, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def test_no_other_token_can_be_found_in_the_box(gateway: GatewayProcess, inside: Sandbox, lease: Lease) -> None:
    key = (gateway.run / "keys" / "signing.key").read_text().strip()
    secrets = {"grade token": lease.grade_token, "control token": gateway.keyring.mint("control"), "key": key}
    script = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env; "
    script += "find / -xdev -type f -size -200k -not -path '/usr/*' -not -path '/opt/*' -exec cat {} + 2>/dev/null"
    seen = inside.run(script, timeout_s=60).output.decode(errors="replace")
    assert lease.agent_token in seen
    for name, secret in secrets.items():
        assert secret not in seen, name
        assert secret.split(".")[-1] not in seen, name
    assert str(gateway.run) not in seen


def test_requests_hidden_in_a_body_are_not_served(gateway: GatewayProcess, inside: Sandbox, lease: Lease) -> None:
    """Two lengths in one request: whoever believes the other one would see a second request."""
    source = (
        "import os, socket\n"
        "inner = b'POST /proxy/pause HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n'\n"
        "body = b'0\\r\\n\\r\\n' + inner\n"
        "head = 'POST %s HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\nContent-Length: %d\\r\\n'"
        "'Transfer-Encoding: chunked\\r\\n\\r\\n' % (PATH, os.environ['OPENAI_API_KEY'], len(body))\n"
        "s = socket.create_connection(('127.0.0.1', 8080), 10); s.settimeout(3); s.sendall(head.encode() + body)\n"
        "try: print(s.recv(9999).split()[1], s.recv(9999)[:15])\n"
        "except OSError as e: print(e)\n"
    ).replace("PATH", repr(model_path(lease)))
    inside.run(f"python - <<'END'\n{source}\nEND", timeout_s=30)
    assert gateway.client.state()["paused"] is False


def test_a_flood_of_connections_leaves_the_gateway_answering(
    gateway: GatewayProcess, inside: Sandbox, lease: Lease, ask: Ask
) -> None:
    flood = (
        "import socket, time\nheld = []\n"
        "try:\n    for _ in range(2000): held.append(socket.create_connection(('127.0.0.1', 8080), 0.2))\n"
        "except OSError: pass\nprint(len(held), flush=True)\ntime.sleep(20)"
    )
    inside.run(f"python - >/tmp/n <<'END' &\n{flood}\nEND\nwhile [ ! -s /tmp/n ]; do sleep 0.1; done", timeout_s=60)
    other = gateway.lease()
    began = time.monotonic()
    assert gateway.client.get_rollout(other.rollout.rollout_id).rollout_id == other.rollout.rollout_id
    assert time.monotonic() - began < 10
    inside.run("kill -9 -1", timeout_s=10)
    assert ask(("POST", model_path(lease), HELLO, lease.agent_token))[0][0] == 200
