"""Issue texts from any server that speaks OpenAI's chat completions.

A text that may not be used is asked for again, and after MAX_TEXTS tries the task leaves with the reason of the last
one: there is no falling back to a template, because a set with two kinds of issue texts would not say so. A server
that is busy or away is asked again with growing pauses; one that refuses or stays away stops the command. Texts are
kept in a journal as they come, so the same command asks for none twice. The key comes from the environment alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from data_pipeline import issue_prompt as prompts
from data_pipeline.journal import Journal
from swe_lightning.errors import UpstreamError, UserError

KEY_VARIABLE = "SWEL_ISSUE_MODEL_KEY"
PROMPT_VERSION = 1
"""Raise when the prompt or the rules change: texts written under other ones are not taken over."""
MAX_TEXTS = 3
BUSY = {408, 409, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class IssueModel:
    """`url` ends where `/chat/completions` begins, usually in `/v1`."""

    url: str
    name: str
    temperature: float = 0.7
    max_tokens: int = 2048
    timeout_s: float = 120.0
    pauses_s: tuple[float, ...] = (1.0, 4.0, 15.0)
    """Before each further try at a server that is busy or away."""

    def checked(self) -> IssueModel:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--issue-model {self.url}: wants the URL of an OpenAI-compatible server, http://HOST/v1")
        if parts.password or parts.username:
            raise UserError(f"--issue-model: no credentials in the URL; put the key into {KEY_VARIABLE}")
        return self


@dataclass(frozen=True)
class Wanted:
    """One bug to write about. `output` runs its failing tests and gives what they print."""

    key: str
    package: str
    version: str
    patch: str
    failing: Sequence[str]
    output: Callable[[], str]


class IssueWriter:
    """`write` is safe for several threads. A context manager."""

    def __init__(self, model: IssueModel, journal: Path, *, seed: int = 0) -> None:
        self.model, self._seed, self._file = model.checked(), seed, journal
        key = os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=model.timeout_s)
        self._known = {record["key"]: str(record["text"]) for _, record in Journal.read(journal)}
        self._journal = Journal(journal)

    def __enter__(self) -> IssueWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._journal.__exit__()

    def write(self, wanted: Wanted) -> tuple[str, str]:
        """(text, ""), or ("", reason) if the model did not write a usable one."""
        key = self._key(wanted)
        if key in self._known:
            return self._known[key], ""
        secret = prompts.secret_lines(wanted.patch)
        messages = prompts.request(wanted.package, wanted.version, wanted.output(), secret)
        reason = ""
        for attempt in range(MAX_TEXTS):
            answer, finish = self._ask(messages, self._seed + attempt)
            text = prompts.clean(answer)
            found = "issue_cut" if finish == "length" else prompts.fault(text, secret, wanted.failing)
            if found is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._journal.append({"key": key, "task": wanted.key, "text": text + "\n"})
                return text + "\n", ""
            reason, messages = found, prompts.again(messages, answer, found)
        return "", reason

    def _key(self, wanted: Wanted) -> str:
        model = self.model
        said = [PROMPT_VERSION, model.name, model.temperature, self._seed, wanted.key, wanted.patch, *wanted.failing]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]

    def _ask(self, messages: Sequence[dict[str, str]], seed: int) -> tuple[str, str]:
        """(answer, finish reason)"""
        body = {
            "model": self.model.name,
            "messages": list(messages),
            "temperature": self.model.temperature,
            "max_tokens": self.model.max_tokens,
            "seed": seed,
        }
        for pause_s in (*self.model.pauses_s, None):
            try:
                reply = self._client.post(f"{self.model.url.rstrip('/')}/chat/completions", json=body)
                why = f"answered {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code == 200:
                    return _answer(reply)
                if reply.status_code not in BUSY:
                    raise UserError(f"issue model {self.model.url} {why}{_hint(reply.status_code)}")
            except httpx.TransportError as error:
                why = f"cannot be reached: {error or type(error).__name__}"
            except _NoAnswer as error:
                why = f"gave no chat completion: {error}"
            if pause_s is not None:
                time.sleep(pause_s)
        raise UpstreamError(f"issue model {self.model.url} {why}; the same command goes on when it is back")


class _NoAnswer(ValueError):
    """A reply in another form."""


def _answer(reply: httpx.Response) -> tuple[str, str]:
    try:
        choice: Any = reply.json()["choices"][0]
        return str(choice["message"].get("content") or ""), str(choice.get("finish_reason") or "")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _NoAnswer(f"{' '.join(reply.text.split())[:200]!r}") from error


def _hint(status: int) -> str:
    if status in (401, 403):
        return f"; put its key into the environment variable {KEY_VARIABLE}"
    return "; is the URL (usually it ends in /v1) and the name of the model right?" if status in (400, 404, 405) else ""
