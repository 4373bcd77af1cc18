"""The model as mini-SWE-agent sees it: one HTTP call to the gateway per turn, text in, one bash command out.

Invariant: exactly one answered request per turn; an answer is never thrown away and asked for again. Retried are only
requests that got no answer, and only while the rollout has time:

    no connection, connection broken   again with back-off for `GATEWAY_PATIENCE_S`, then infra gateway_lost
    408, 429, 503, 507                 wait Retry-After (the gate is closed, the disk is full), then again
    500, 502, 504                      twice more, then infra upstream_error
    400 context_overflow, 413          the episode ends: context_overflow
    400 bad_history                    the episode ends: bad_history
    400, 422 anything else             infra: upstream_error; on the first call harness_crash (our own request)
    401, 403, 404, 409, 410            nobody wants this rollout any more: infra cancelled or gateway_lost

All of it counts as waiting, also the answered calls: see budget.py for what that means when the time runs out.

There is no price list and no cost: neither says anything about a model of ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from swe_lightning.errors import InfraError
from swe_lightning.harness import templates
from swe_lightning.harness.budget import TimeBudget, over
from swe_lightning.harness.episode_log import EpisodeLog
from swe_lightning.harness.http import ConnectionFailed, HttpPool, Reply
from swe_lightning.harness.mini import FormatError, parse_regex_actions
from swe_lightning.records import InfraReason

ACTION_REGEX = r"```(?:bash|sh|mswea_bash_command)[ \t]*\n(.*?)\n```"
GATEWAY_PATIENCE_S = 300.0
WAIT_STATUSES = {408, 429, 503, 507}
UPSTREAM_RETRIES = 2
MAX_WAIT_S = 30.0


@dataclass
class ModelConfig:
    """Serialised into mini-SWE-agent's trajectory."""

    model_name: str = "policy"
    max_tokens: int = 12288
    observation_chars: int = 6000
    observation_template: str = templates.OBSERVATION
    format_error_template: str = templates.FORMAT_ERROR
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, for example `seed` and `user`. Nothing is sent that was not given."""


class GatewayModel:
    """mini-SWE-agent's Model protocol over the gateway's chat/completions. One instance per episode."""

    def __init__(
        self, pool: HttpPool, base_url: str, token: str, *, config: ModelConfig, budget: TimeBudget, log: EpisodeLog
    ) -> None:
        self.config = config
        self.answers = 0
        self.longest_prompt_tokens = 0
        self._pool = pool
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        self._budget = budget
        self._log = log

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """One turn. Raises FormatError when the reply holds no single command; the reply stays in the history, so that
        the model sees its mistake and the next prompt continues this one."""
        self._log.follow(messages)
        body = {
            "model": self.config.model_name,
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "max_tokens": self.config.max_tokens,
            **self.config.extra_body,
            **kwargs,
        }
        content, finish_reason = _content(self._ask(orjson.dumps(body)))
        extra: dict[str, Any] = {"cost": 0.0, "finish_reason": finish_reason, "timestamp": time.time()}
        message = {"role": "assistant", "content": content, "extra": extra}
        try:
            extra["actions"] = parse_regex_actions(
                content,
                action_regex=ACTION_REGEX,
                format_error_template=self.config.format_error_template,
                template_kwargs={"finish_reason": finish_reason},
            )
        except FormatError as error:
            raise FormatError(message, *error.messages) from error
        return message

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        return [self._observation(output) for output in outputs]

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"model": vars(self.config), "model_type": f"{__name__}.{type(self).__name__}"}}}

    def _observation(self, output: dict[str, Any]) -> dict[str, Any]:
        content = templates.observation(
            self.config.observation_template,
            text=output["output"],
            returncode=output["returncode"],
            exception_info=output.get("exception_info", ""),
            chars=self.config.observation_chars,
        )
        extra = {
            "raw_output": output["output"],
            "returncode": output["returncode"],
            "exception_info": output.get("exception_info", ""),
            "timestamp": time.time(),
        }
        return {"role": "user", "content": content, "extra": extra}

    def _ask(self, body: bytes) -> Reply:
        """Send until there is an answer, the episode is over, or a machine is found broken."""
        silent_since: float | None = None
        failures = 0
        for tries in range(1_000_000):
            sent = time.monotonic()
            if sent >= self._budget.deadline:
                raise self._budget.out_of_time("before the gateway took the call", refused=tries > 0)
            try:
                with self._budget.waiting():
                    reply = self._pool.post(self._url, body, self._headers, timeout_s=self._budget.deadline - sent)
            except TimeoutError:
                raise self._budget.out_of_time("while a model call was under way") from None
            except ConnectionFailed as error:
                silent_since = silent_since or sent
                if time.monotonic() - silent_since > GATEWAY_PATIENCE_S:
                    raise InfraError(InfraReason.GATEWAY_LOST, f"the gateway does not answer: {error}") from error
                self._sleep(min(0.1 * 2 ** min(tries, 6), 5.0))
                continue
            silent_since = None
            if reply.status == 200:
                self.answers += 1
                self.longest_prompt_tokens = max(self.longest_prompt_tokens, _prompt_tokens(reply))
                return reply
            failures += reply.status in (500, 502, 504)
            self._sleep(self._judge(reply, failures))
        raise AssertionError("unreachable")

    def _judge(self, reply: Reply, failures: int) -> float:
        """Seconds to wait before asking again, or the exception that ends the episode."""
        code, text = _error(reply)
        if reply.status in WAIT_STATUSES:
            return _retry_after(reply)
        if reply.status in (500, 502, 504) and failures <= UPSTREAM_RETRIES:
            return 0.2 * 2**failures
        if reply.status >= 500:
            raise InfraError(InfraReason.UPSTREAM_ERROR, f"{reply.status} {code}: {text}")
        if code == "context_overflow" or reply.status == 413:
            raise over("context_overflow", text)
        if code == "bad_history" and self.answers:
            raise over("bad_history", text)
        if reply.status in (400, 422):
            reason = InfraReason.UPSTREAM_ERROR if self.answers else InfraReason.HARNESS_CRASH
            raise InfraError(reason, f"the request was refused: {code}: {text}")
        ended = code in ("rollout_ended", "cancelled") or reply.status in (409, 410)
        reason = InfraReason.CANCELLED if ended else InfraReason.GATEWAY_LOST
        raise InfraError(reason, f"the gateway refused the call: {reply.status} {code}: {text}")

    def _sleep(self, seconds: float) -> None:
        with self._budget.waiting():
            time.sleep(max(min(seconds, self._budget.left_s), 0))


def _content(reply: Reply) -> tuple[str, str | None]:
    try:
        choice = orjson.loads(reply.body)["choices"][0]
        return choice["message"].get("content") or "", choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InfraError(InfraReason.UPSTREAM_ERROR, f"an answer without a message: {reply.body[:200]!r}") from error


def _prompt_tokens(reply: Reply) -> int:
    """As the engine counted them; 0 where it does not say."""
    try:
        return int(orjson.loads(reply.body)["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError):
        return 0


def _error(reply: Reply) -> tuple[str, str]:
    try:
        error = orjson.loads(reply.body)["error"]
        return str(error.get("code") or error.get("type") or ""), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", reply.body[:300].decode("utf-8", "replace")


def _retry_after(reply: Reply) -> float:
    try:
        return min(max(float(reply.headers.get("Retry-After", "1")), 0.05), MAX_WAIT_S)
    except ValueError:
        return 1.0
