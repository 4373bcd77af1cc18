"""The OpenAPI document against the real process: what it allows and what it forbids, for every path it names.

No request may end in a 5xx, an undocumented status, or a body of another shape; what the document forbids must be
refused. The proxy is asked as the agent of a running attempt, so that requests get behind the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from .conftest import EngineServer, GatewayProcess, http, running

CHECKED = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def fuzzed(shared_engine: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway of its own: what is registered and paused here must not reach other tests."""
    shared_engine.reset()
    options = ("--pause-wait-s", "0.1", "--patience-s", "0.1", "--health-interval-s", "0")
    with running(tmp_path_factory.mktemp("fuzz"), *options) as gateway:
        gateway.client.register_model(shared_engine.url, version=1)
        yield gateway


@pytest.mark.parametrize("part", ["proxy", "control"])
def test_the_document_is_true(fuzzed: GatewayProcess, part: str) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    lease = fuzzed.lease()
    known: dict[str, Any] = {"rollout_id": lease.rollout.rollout_id, "attempt_id": 1, "attempt": 1, "mode": "train"}
    token = lease.agent_token if part == "proxy" else fuzzed.keyring.mint("control")
    headers = {"authorization": f"Bearer {token}"}
    operations = [o.ok() for o in schema.get_all_operations()]
    chosen = [o for o in operations if o.path.startswith("/proxy/rollout/") == (part == "proxy")]
    assert len(chosen) == (7 if part == "proxy" else 15)
    for operation in chosen:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if operation.path == "/healthz" and mode is GenerationMode.NEGATIVE:
                continue  # takes nothing that could be wrong
            strategy = operation.as_strategy(generation_mode=mode)
            # What the document leaves open belongs to the model protocol, and there the engine may refuse more.
            _check(strategy, known, headers, [positive_data_acceptance] if part == "proxy" else [])


def test_nothing_but_health_answers_without_a_token(fuzzed: GatewayProcess) -> None:
    known = {"rollout_id": fuzzed.lease().rollout.rollout_id, "attempt_id": 1, "mode": "train"}
    for path, operations in http.get(f"{fuzzed.url}/openapi.json").json()["paths"].items():
        for method in operations:
            response = http.request(method, fuzzed.url + path.format(**known), content=b"{")
            assert response.status_code == (200 if path == "/healthz" else 401), path
            assert bool(operations[method].get("security")) == (path != "/healthz"), path


def _check(strategy: Any, known: dict[str, Any], headers: dict[str, str], excluded: list[Any]) -> None:
    @CHECKED
    @given(case=strategy, real=st.booleans())
    def check(case: Any, real: bool) -> None:
        if real:  # else nearly every request would end at an unknown rollout
            case.path_parameters.update({k: v for k, v in known.items() if k in case.path_parameters})
        if isinstance(case.query, dict) and "wait" in case.query:
            case.query["wait"] = 0
        response = case.call(headers=headers)
        case.validate_response(response, excluded_checks=[ignored_auth, *excluded])

    check()
