"""How clients ask: one small adapter per protocol, in a table by path. The engine always hears OpenAI's routes.

A new protocol is a new module with an `Adapter` and a line here; its documentation for /openapi.json is in apidoc.py.
"""

from __future__ import annotations

from swe_lightning.gateway.protocols import anthropic, chat, responses
from swe_lightning.gateway.protocols.base import Adapter
from swe_lightning.gateway.recording import CHAT, COMPLETION

ADAPTERS: dict[str, Adapter] = {
    f"openai/v1/{CHAT}": chat.CHAT_ADAPTER,
    f"openai/v1/{COMPLETION}": chat.COMPLETION_ADAPTER,
    "openai/v1/responses": responses.ADAPTER,
    "anthropic/v1/messages": anthropic.ADAPTER,
}
COUNT_TOKENS = "anthropic/v1/messages/count_tokens"
MODELS = ("openai/v1/models", "anthropic/v1/models")
