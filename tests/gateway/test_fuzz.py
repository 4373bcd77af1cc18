"""The OpenAPI document against the real process: what it allows and what it forbids, for every path it names.

No request may end in a 5xx, an undocumented status, or a body of another shape; what the document forbids must be
refused. Boundary cases of every field come first, then random ones. The proxy is asked as the agent of a running
attempt, so that requests get behind the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from .conftest import EngineServer, GatewayProcess, http, running

MODES = [HypothesisTestMode.COVERAGE, HypothesisTestMode.FUZZING]
BOUNDED = settings(
    max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
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
    operations = [o.ok() for o in schema.get_all_operations()]
    chosen = [o for o in operations if o.path.startswith("/proxy/rollout/") == (part == "proxy")]
    assert len(chosen) == (7 if part == "proxy" else 15)
    checked = [_check(fuzzed, operation, schema.config, part) for operation in chosen]
    assert min(checked) > 2
    assert sum(checked) > 500


def _check(gateway: GatewayProcess, operation: Any, project: Any, part: str) -> int:
    """Send all cases of an operation; returns how many there were."""
    lease, count = gateway.lease(), 0
    known: dict[str, Any] = {"rollout_id": lease.rollout.rollout_id, "attempt_id": 1, "mode": "train"}
    token = lease.agent_token if part == "proxy" else gateway.keyring.mint("control")
    # What the document leaves open belongs to the model protocol, and there the engine may refuse more.
    excluded = [ignored_auth, positive_data_acceptance] if part == "proxy" else [ignored_auth]

    def check(case: Any) -> None:
        nonlocal count
        forbidden = {k for k, v in case.meta.components.items() if v.mode is GenerationMode.NEGATIVE}
        if ParameterLocation.HEADER in forbidden:
            return  # the token: the test below
        if isinstance(case.body, dict) and _size(case.body.get("rollouts")) > 100:
            return  # thousands at once are the store's business, and take their time
        if ParameterLocation.PATH not in forbidden:
            case.path_parameters.update({k: v for k, v in known.items() if k in case.path_parameters})
        if ParameterLocation.QUERY not in forbidden and "wait" in case.query:
            case.query["wait"] = 0
        response = case.call(headers={"authorization": f"Bearer {token}"})
        case.validate_response(response, excluded_checks=excluded)
        count += 1

    create_test(operation=operation, test_func=check, config=HypothesisTestConfig(project, MODES, BOUNDED))()
    return count


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def test_nothing_but_health_answers_without_a_token(fuzzed: GatewayProcess) -> None:
    known = {"rollout_id": fuzzed.lease().rollout.rollout_id, "attempt_id": 1, "mode": "train"}
    for path, operations in http.get(f"{fuzzed.url}/openapi.json").json()["paths"].items():
        for method in operations:
            response = http.request(method, fuzzed.url + path.format(**known), content=b"{")
            assert response.status_code == (200 if path == "/healthz" else 401), path
            assert bool(operations[method].get("security")) == (path != "/healthz"), path
