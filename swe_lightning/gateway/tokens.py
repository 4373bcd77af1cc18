"""Capability tokens: what the bearer may do, for which rollout and attempt, until when.

Signed (HS256) with one key per run, so that any gateway process of the run can check them without a look-up. The key
lies in the run directory (0600) or in `SWEL_SIGNING_KEY`, never on a command line. An agent token can ask the model
and add custom events to its own attempt, and nothing else; in particular it can neither read a task nor post a reward.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jwt

from swe_lightning.errors import DataError, UserError
from swe_lightning.gateway.problems import Problem, forbidden

SCOPES = ("control", "agent", "grade")
KEY_VARIABLE = "SWEL_SIGNING_KEY"
DAY_S = 86400.0
_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified token says."""

    scope: str
    rollout_id: str | None
    attempt: int | None
    expires_at: float

    def __str__(self) -> str:
        return self.scope if self.rollout_id is None else f"{self.scope} of {self.rollout_id} attempt {self.attempt}"


class Keyring:
    """Mints and verifies tokens with one secret."""

    def __init__(self, secret: str) -> None:
        if len(secret) < 32:
            raise UserError(f"the signing key is shorter than 32 characters; set a longer {KEY_VARIABLE} or unset it")
        self._secret = secret
        self._verified: dict[str, Claims] = {}

    @classmethod
    def load_or_create(cls, key_file: Path) -> Keyring:
        """The key in `SWEL_SIGNING_KEY`, else in `key_file`, which is created (0600) if absent."""
        explicit = os.environ.get(KEY_VARIABLE)
        if explicit:
            return cls(explicit)
        if not key_file.exists():
            _create_key(key_file)
        if key_file.stat().st_mode & 0o077:
            raise DataError(f"{key_file} can be read by other users; run chmod 600 on it and restart")
        return cls(key_file.read_text(encoding="ascii").strip())

    def fingerprint(self) -> str:
        """Says which key this is without saying anything about it."""
        return hashlib.sha256(b"swel store of " + self._secret.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Verified tokens that are remembered."""
        return len(self._verified)

    def mint(
        self, scope: str, *, rollout_id: str | None = None, attempt: int | None = None, ttl_s: float = 30 * DAY_S
    ) -> str:
        """A token for `scope`; agent and grade tokens are bound to one rollout and attempt."""
        if scope not in SCOPES:
            raise ValueError(f"no scope {scope!r}")
        if (scope == "control") != (rollout_id is None) or (rollout_id is None) != (attempt is None):
            raise ValueError("agent and grade tokens name a rollout and an attempt; control tokens name neither")
        now = time.time()
        payload: dict[str, object] = {"scope": scope, "iat": int(now), "exp": int(now + ttl_s)}
        if rollout_id is not None:
            payload |= {"rid": rollout_id, "att": attempt}
        return jwt.encode(payload, self._secret, algorithm="HS256")

    def verify(self, token: str) -> Claims:
        """The token's claims; Problem 401 when it is missing, tampered with or expired."""
        claims = self._verified.get(token)
        if claims is None:
            claims = self._decode(token)
            if len(self._verified) >= _CACHE_SIZE:
                self._verified.clear()
            self._verified[token] = claims
        if claims.expires_at <= time.time():
            raise Problem(401, "token_expired", "the token has expired; claim the rollout again or mint a new token")
        return claims

    def _decode(self, token: str) -> Claims:
        if not token:
            raise Problem(401, "token_missing", "send Authorization: Bearer with a token of this run")
        try:
            # Expiry is checked by verify(), on cached claims too.
            options = {"require": ["exp", "scope"], "verify_exp": False, "verify_iat": False}
            payload = jwt.decode(token, self._secret, algorithms=["HS256"], options=options)  # type: ignore[arg-type]
            return Claims(payload["scope"], payload.get("rid"), payload.get("att"), float(payload["exp"]))
        except (jwt.InvalidTokenError, ValueError, TypeError):
            raise Problem(401, "token_invalid", "the token was not signed by this run's key, or was changed") from None


def require(claims: Claims, *scopes: str, rollout_id: str | None = None, attempt: int | None = None) -> None:
    """Problem 403 naming the missing scope unless `claims` has one of `scopes`, for that rollout and attempt.

    A control token is bound to no rollout. `attempt` None means any attempt of the rollout.
    """
    bound = claims.scope == "control" or (
        claims.rollout_id == rollout_id and (attempt is None or claims.attempt == attempt)
    )
    if claims.scope in scopes and bound:
        return
    needed = " or ".join(scopes)
    if rollout_id is not None and scopes != ("control",):
        needed += f" for {rollout_id}" + ("" if attempt is None else f" attempt {attempt}")
    raise forbidden(needed, str(claims))


def bearer(header: str | None) -> str:
    """The token of an Authorization header, or an empty string."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _create_key(key_file: Path) -> None:
    """Write a fresh key so that of two processes starting together both end with the same one."""
    key_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, temporary = tempfile.mkstemp(dir=key_file.parent)  # mkstemp creates 0600
    try:
        with os.fdopen(fd, "w") as f:
            f.write(secrets.token_hex(32))
            f.flush()
            os.fsync(f.fileno())
        os.link(temporary, key_file)
    except FileExistsError:
        pass
    finally:
        Path(temporary).unlink(missing_ok=True)
