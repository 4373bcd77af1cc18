"""Tokens: signed, expiring, bound; the key stays private."""

from __future__ import annotations

import base64
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swe_lightning.errors import DataError
from swe_lightning.gateway.problems import Problem
from swe_lightning.gateway.tokens import Keyring, bearer, require


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring.load_or_create(tmp_path / "keys" / "signing.key")


def test_round_trip(ring: Keyring) -> None:
    claims = ring.verify(ring.mint("agent", rollout_id="r", attempt=2))
    assert (claims.scope, claims.rollout_id, claims.attempt) == ("agent", "r", 2)


def test_key_is_private_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "signing.key"
    token = Keyring.load_or_create(file).mint("control")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Keyring.load_or_create(file).verify(token).scope == "control"
    file.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        Keyring.load_or_create(file)


def test_processes_that_start_together_end_with_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        rings = list(pool.map(lambda _: Keyring.load_or_create(tmp_path / "keys" / "signing.key"), range(16)))
    assert len({ring.fingerprint() for ring in rings}) == 1
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["signing.key"]


def test_what_is_remembered_of_tokens_is_bounded(ring: Keyring) -> None:
    for attempt in range(4100):
        ring.verify(ring.mint("agent", rollout_id="r", attempt=attempt))
    assert len(ring) <= 4096


def test_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEL_SIGNING_KEY", "k" * 40)
    token = Keyring.load_or_create(tmp_path / "none").mint("control")
    assert not (tmp_path / "none").exists()
    assert Keyring("k" * 40).verify(token).scope == "control"


def test_expiry_counts_for_tokens_seen_before(ring: Keyring) -> None:
    token = ring.mint("control", ttl_s=1.0)
    ring.verify(token)
    expired = ring.mint("control", ttl_s=-5)
    with pytest.raises(Problem, match="expired") as e:
        ring.verify(expired)
    assert (e.value.status, e.value.code) == (401, "token_expired")
    with pytest.raises(Problem, match="expired"):
        ring.verify(expired)


def test_changed_or_unsigned_tokens_are_refused(ring: Keyring) -> None:
    head, payload, signature = ring.mint("agent", rollout_id="r", attempt=1).split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    raised = base64.urlsafe_b64encode(json.dumps(claims | {"scope": "control"}).encode()).decode().rstrip("=")
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').decode().rstrip("=")
    other = Keyring("x" * 40).mint("control")
    for token in (f"{head}.{raised}.{signature}", f"{none}.{raised}.", other, "", "a.b.c", "é"):
        with pytest.raises(Problem) as e:
            ring.verify(token)
        assert e.value.status == 401


def test_require_names_the_missing_scope(ring: Keyring) -> None:
    agent = ring.verify(ring.mint("agent", rollout_id="a", attempt=1))
    require(agent, "agent", rollout_id="a", attempt=1)
    for scopes, rollout, attempt in [(("control",), None, None), (("agent",), "b", 1), (("agent",), "a", 2)]:
        with pytest.raises(Problem) as e:
            require(agent, *scopes, rollout_id=rollout, attempt=attempt)
        assert e.value.status == 403
        assert scopes[0] in e.value.message
        assert "agent of a attempt 1" in e.value.message


def test_bound_scopes_need_a_rollout(ring: Keyring) -> None:
    with pytest.raises(ValueError, match="attempt"):
        ring.mint("agent")
    with pytest.raises(ValueError, match="neither"):
        ring.mint("control", rollout_id="r", attempt=1)


def test_bearer_header() -> None:
    assert bearer("Bearer abc") == "abc"
    assert bearer("Basic abc") == bearer(None) == ""
