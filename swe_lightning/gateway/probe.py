"""One call that tells whether an engine can be trained from: asked before a run, not found out after it.

The probe sends what the gateway sends and judges the answer as the gateway judges it.
"""

from __future__ import annotations

import httpx

from swe_lightning.errors import UpstreamError
from swe_lightning.gateway import recording
from swe_lightning.gateway.endpoints import Endpoint
from swe_lightning.gateway.jsonio import dumps, loads
from swe_lightning.records import Untrainable

_MISSING = {
    Untrainable.NO_PROMPT_IDS: "prompt_token_ids is missing (the engine must honour return_token_ids)",
    Untrainable.NO_RESPONSE_IDS: "choices[0].token_ids is missing (the engine must honour return_token_ids)",
    Untrainable.TOKEN_LOSS: "choices[0].token_ids and usage.completion_tokens disagree",
    Untrainable.LOGPROB_LEN_MISMATCH: "choices[0].logprobs is missing or not as long as token_ids",
}


def probe_engine(url: str, *, name: str = "policy", timeout_s: float = 60.0) -> None:
    """Return if a chat call to `url` brings back what training needs; UpstreamError naming the missing field if not."""
    request = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    body = recording.prepare(request, recording.CHAT, "train", {}).body | {"model": name}
    address = Endpoint(url).address(recording.CHAT)
    try:
        headers = {"content-type": "application/json"}
        response = httpx.post(address, content=dumps(body), headers=headers, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as error:
        raise UpstreamError(f"no model server answers at {address}: {error or type(error).__name__}") from error
    if response.status_code != 200:
        raise UpstreamError(f"{address} answered {response.status_code}: {response.text[:300]}")
    try:
        reply = loads(response.content)
    except ValueError:
        raise UpstreamError(f"{address} answered something that is not JSON: {response.text[:100]}") from None
    reason = recording.check_reply(reply, recording.CHAT, "train").reason
    if reason is not None:
        raise UpstreamError(f"{address} cannot be trained from: {_MISSING.get(reason, f'the reply is {reason}')}")
