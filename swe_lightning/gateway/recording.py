"""What is asked of the engine, and what may be believed of its answer. Pure functions on parsed JSON.

Train mode fixes sampling so that the recorded log-prob is the sampling distribution's: the recipe's temperature, top_p
1, top_k off, no penalties, no masks; the client's own values are ignored and reported. The full explicit set is sent
every time, because an unset value silently becomes the model's generation_config. A reply is trainable only if its
ids, its log-probs and its own token count agree; otherwise it carries a typed reason, and nothing is ever filled in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swe_lightning.gateway.jsonio import loads
from swe_lightning.records import Untrainable

CHAT, COMPLETION = "chat/completions", "completions"
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# Anything that bends the distribution away from softmax(logits / temperature), or shifts ids against log-probs.
BENDING = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "logits_processors",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "response_format",
    "use_beam_search",
    "best_of",
    "length_penalty",
    "ignore_eos",
    "echo",
    "suffix",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "vllm_xargs",
)
_TRANSPORT = ("stream", "stream_options", "store", "metadata", "user", "service_tier")
_OURS = ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params", "prompt_text")


@dataclass(slots=True)
class Sent:
    """What goes upstream, and what a person wants to know about it."""

    body: dict[str, Any]
    sampling: dict[str, Any]
    """Effective sampling parameters, `max_tokens` if any, and `ignored`: the client's values that were not honoured."""


@dataclass(slots=True)
class Recorded:
    """What the reply proves."""

    prompt_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    response_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    finish_reason: str | None = None
    reason: Untrainable | None = None


def prepare(body: dict[str, Any], protocol: str, mode: str, configured: dict[str, Any]) -> Sent:
    """The upstream request. `configured`: sampling section of the rollout; in val mode it wins over the client."""
    upstream = {k: v for k, v in body.items() if k not in _TRANSPORT}
    if mode == "train":
        sampling = NEUTRAL | {"temperature": configured.get("temperature", 1.0)}
        for name in BENDING:
            upstream.pop(name, None)
    else:
        own = {k: body[k] for k in NEUTRAL if body.get(k) is not None}
        sampling = NEUTRAL | own | {k: v for k, v in configured.items() if k in NEUTRAL and v is not None}
    bending = BENDING if mode == "train" else ()
    ignored = {k: body[k] for k in bending if body.get(k) not in (None, False)}
    ignored |= {k: body[k] for k in NEUTRAL if body.get(k) is not None and body[k] != sampling[k]}
    if mode == "train":
        ignored |= _unforce(upstream)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    upstream.pop("max_completion_tokens", None)
    upstream.pop("max_tokens", None)
    effective = dict(sampling)
    if limit:
        upstream["max_tokens"] = effective["max_tokens"] = limit
    if body.get("seed") is not None:
        effective["seed"] = body["seed"]
    if ignored:
        effective["ignored"] = ignored
    upstream |= sampling | {"n": 1, "stream": False, "return_token_ids": True}
    if protocol == CHAT:
        upstream |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    else:
        asked = body.get("logprobs")
        upstream["logprobs"] = asked if type(asked) is int else 0
    return Sent(upstream, effective)


def _unforce(upstream: dict[str, Any]) -> dict[str, Any]:
    """Leave the choice of a tool, and how its arguments are spelt, to the model: engines force both by masking tokens.

    Changes the request (never the client's own objects); returns what was taken out.
    """
    taken: dict[str, Any] = {}
    choice = upstream.get("tool_choice")
    if choice not in (None, "auto", "none"):
        taken["tool_choice"], upstream["tool_choice"] = choice, "auto"
    tools = upstream.get("tools")
    functions = [_function(tool) for tool in tools] if isinstance(tools, list) else []
    if isinstance(tools, list) and any(function.get("strict") for function in functions):
        taken["tools.strict"] = [str(function.get("name")) for function in functions if function.get("strict")]
        upstream["tools"] = [
            tool | {"function": {k: v for k, v in function.items() if k != "strict"}} if function else tool
            for tool, function in zip(tools, functions, strict=True)
        ]
    return taken


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def check_reply(reply: Any, protocol: str, mode: str) -> Recorded:
    """What the reply proves. Never raises: what cannot be read is a reason."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return Recorded(reason=Untrainable.UPSTREAM_ERROR)
    choice = choices[0]
    prompt = _ids((reply if protocol == CHAT else choice).get("prompt_token_ids"))
    response = _ids(choice.get("token_ids"))
    logprobs = _logprobs(choice.get("logprobs"), protocol)
    finish = choice.get("finish_reason")
    usage = reply.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    recorded = Recorded(finish_reason=finish if isinstance(finish, str) else None)
    if prompt is not None:
        recorded.prompt_ids = prompt
    if response is not None:
        recorded.response_ids = response
    if logprobs is not None:
        recorded.logprobs = logprobs
    recorded.reason = _reason(recorded, counted, mode, no_ids=response is None)
    return recorded


def _reason(recorded: Recorded, counted: Any, mode: str, *, no_ids: bool) -> Untrainable | None:
    """Why the call may not be trained on; the most telling reason first."""
    sampled = recorded.response_ids.size
    if recorded.finish_reason == "abort":
        return Untrainable.ABORTED
    if not recorded.prompt_ids.size:
        return Untrainable.NO_PROMPT_IDS
    if no_ids:
        return Untrainable.NO_RESPONSE_IDS
    if counted is not None and counted != sampled:
        return Untrainable.TOKEN_LOSS
    if not sampled:
        return Untrainable.NO_RESPONSE_IDS
    if recorded.logprobs.size != sampled:
        return Untrainable.LOGPROB_LEN_MISMATCH
    return None if mode == "train" else Untrainable.VAL_MODE


def strip_reply(reply: dict[str, Any], asked: dict[str, Any], protocol: str) -> dict[str, Any]:
    """The reply as the client asked for it: no ids, no log-probs unless wanted; text and tool arguments untouched."""
    wants_ids = bool(asked.get("return_token_ids"))
    logprobs = asked.get("logprobs")
    wants_logprobs = bool(logprobs) if protocol == CHAT else logprobs is not None and logprobs is not False
    shown = reply if wants_ids else {k: v for k, v in reply.items() if k not in _OURS}
    shown = dict(shown)
    shown["choices"] = [_strip_choice(c, wants_ids, wants_logprobs) for c in reply["choices"]]
    if isinstance(asked.get("model"), str):
        shown["model"] = asked["model"]
    return shown


def stored_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply as it is kept beside the packed arrays: without ids and log-probs."""
    kept = {k: v for k, v in reply.items() if k not in _OURS}
    kept["choices"] = [_strip_choice(c, False, False) for c in reply["choices"]]
    return kept


def _strip_choice(choice: dict[str, Any], wants_ids: bool, wants_logprobs: bool) -> dict[str, Any]:
    kept = choice if wants_ids else {k: v for k, v in choice.items() if k != "token_ids" and k not in _OURS}
    return dict(kept) if wants_logprobs else {**kept, "logprobs": None}


# The same refusal in the words of several engines and of our own.
_LIMIT = re.compile(r"(?:context length is|max_context is|context of|limit of) (\d+)")
_PROMPT = re.compile(r"(?:request has|prompt has|prompt of|prompt is|\() ?(\d+) (?:input )?(?:tokens|in the )")
_OVERFLOW = re.compile(
    r"maximum context length|context[ _](?:length|window|overflow)|max_model_len|max_context|too long", re.I
)


def is_overflow(code: str | None, message: str) -> bool:
    """Whether a 400 of the engine means that prompt and answer do not fit its context."""
    return code in ("context_overflow", "context_length_exceeded") or bool(_OVERFLOW.search(message))


def space_left(message: str) -> int | None:
    """Tokens left for the answer according to the engine's refusal; None if it does not say."""
    limit, prompt = _LIMIT.search(message), _PROMPT.search(message)
    return int(limit[1]) - int(prompt[1]) if limit and prompt else None


def broken_history(body: dict[str, Any]) -> bool:
    """Whether an assistant message in the history carries tool arguments that are not JSON: no retry can cure that."""
    for message in body.get("messages") or []:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                try:
                    loads(arguments.encode(errors="surrogatepass"))
                except (ValueError, RecursionError):
                    return True
    return False


def _ids(value: Any) -> np.ndarray | None:
    """The list as int32, or None if it is not a list of token ids. Long lists come as arrays (see reply_reader.py)."""
    if isinstance(value, np.ndarray):
        return value
    array = _numbers(value, "iu")
    if array is None or (array.size and (array.min() < 0 or array.max() > 0x7FFFFFFF)):
        return None
    return array.astype(np.int32)


def _logprobs(value: Any, protocol: str) -> np.ndarray | None:
    if not isinstance(value, dict):
        return None
    if protocol == CHAT:
        content = value.get("content")
        if not isinstance(content, list):
            return None
        try:
            array = _numbers([entry["logprob"] for entry in content], "iuf")
        except (TypeError, KeyError):
            return None
    else:
        array = _numbers(value.get("token_logprobs"), "iuf")
    return array.astype(np.float32) if array is not None and bool(np.isfinite(array).all()) else None


def _numbers(value: Any, kinds: str) -> np.ndarray | None:
    """A one-dimensional array of a list of numbers of those kinds; numpy checks 30,000 ids in a millisecond."""
    if not isinstance(value, list):
        return None
    if not value:
        return np.empty(0, np.int64)
    try:
        array = np.array(value)
    except ValueError:  # ragged
        return None
    return array if array.ndim == 1 and array.dtype.kind in kinds else None
