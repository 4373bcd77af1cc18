"""Scripted strategies behind the same HTTP layout as the embedded server: demonstrations and baselines, no model.

A strategy is a pure function of the conversation and a seed. Ids come from a real tokenizer directory where one is
given (so that scripted rollouts become the very rows a policy would have produced), else from plain bytes; log-probs
are 0.0. Nothing here imports torch at module level.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swe_lightning.errors import DataError, UserError
from swe_lightning.policy.app import App, Reply, bind, run
from swe_lightning.policy.demonstrator import (
    LOOK,
    SUBMIT,
    TEST,
    UNDO,
    Demonstrator,
    block,
    edit_command,
    read,
)
from swe_lightning.policy.edits import EDITS, applicable
from swe_lightning.policy.wire import RequestError, Sample, chat_reply, parse_messages, parse_options, room

Messages = Sequence[Mapping[str, Any]]


class Strategy(Protocol):
    def reply(self, messages: Messages, seed: int) -> str:
        """The assistant's text that continues the conversation."""
        ...


class Noop:
    """Submits at once."""

    def reply(self, messages: Messages, seed: int) -> str:
        return block(SUBMIT)


class RandomEdit:
    """Baseline: look, one random applicable edit, submit."""

    def reply(self, messages: Messages, seed: int) -> str:
        story = read(messages)
        if story.turns == 0:
            return block(LOOK)
        if story.turns > 1:
            return block(SUBMIT)
        fitting = applicable(story.line or "") or list(EDITS)
        return block(edit_command(random.Random(seed).choice(fitting)))


class Enumerate:
    """Baseline: look, try up to six applicable edits one after another with tests, stop on pass."""

    tries = 6

    def reply(self, messages: Messages, seed: int) -> str:
        story = read(messages)
        if story.turns == 0:
            return block(LOOK)
        fitting = applicable(story.line or "")
        random.Random(seed).shuffle(fitting)
        if story.passed or story.edits >= min(self.tries, len(fitting)):
            return block(SUBMIT)
        undo = f"{UNDO}; " if story.edits else ""
        return block(f"{undo}{edit_command(fitting[story.edits])}; {TEST}")


class Replay:
    """A recorded list of replies, then submit."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = list(replies)

    def reply(self, messages: Messages, seed: int) -> str:
        turn = sum(m["role"] == "assistant" for m in messages)
        return self.replies[turn] if turn < len(self.replies) else block(SUBMIT)


STRATEGIES: dict[str, type[Any]] = {
    "demonstrator": Demonstrator,
    "random_edit": RandomEdit,
    "enumerate": Enumerate,
    "noop": Noop,
}


def make_strategy(name: str) -> Strategy:
    """By name, or `replay:FILE.json` (a list of replies). UserError for anything else."""
    if name.startswith("replay:"):
        path = Path(name.removeprefix("replay:"))
        try:
            replies = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a JSON list of replies ({error})") from error
        if not isinstance(replies, list) or not all(isinstance(r, str) for r in replies):
            raise DataError(f"{path}: must hold a JSON list of strings, one reply per turn")
        return Replay(replies)
    if name not in STRATEGIES:
        raise UserError(f"no strategy {name}; known: {', '.join(STRATEGIES)}, replay:FILE.json")
    strategy: Strategy = STRATEGIES[name]()
    return strategy


class ByteTokenizer:
    """Fallback ids: a byte is its own id, 256 ends a message, 257 and up name the speaker."""

    end = 256
    roles = ("system", "user", "assistant", "tool")

    def prompt(self, messages: Messages) -> list[int]:
        ids: list[int] = []
        for m in messages:
            ids += [self._role(m["role"]), *m["content"].encode(), self.end]
        return [*ids, self._role("assistant")]

    def reply(self, text: str) -> list[int]:
        return [*text.encode(), self.end]

    def piece(self, token: int) -> str:
        return bytes([token]).decode("latin-1") if token < 256 else ""

    def _role(self, role: str) -> int:
        return 257 + (self.roles.index(role) if role in self.roles else len(self.roles))


class DirectoryTokenizer:
    """The tokenizer and chat template of a model directory. UserError if it holds none; the hub is never asked."""

    def __init__(self, directory: Path) -> None:
        from swe_lightning.policy.server import encoder
        from swe_lightning.policy.weights import load_tokenizer

        self.tokenizer: Any = load_tokenizer(directory)
        if not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer in {directory} has no chat template; give a chat model's directory")
        self.encode = encoder(self.tokenizer)

    def prompt(self, messages: Messages) -> list[int]:
        return self.encode(
            self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        )

    def reply(self, text: str) -> list[int]:
        return [*self.encode(text), self.tokenizer.eos_token_id]

    def piece(self, token: int) -> str:
        text: str = self.tokenizer.decode([token])
        return text


def seed_of(seed: int | None, user: str | None, messages: Messages) -> int:
    """The request's seed, else one derived from its `user` field, else from the first user message."""
    if seed is not None:
        return seed
    text = user or next((m["content"] for m in messages if m["role"] == "user"), "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class ScriptedServer:
    """Chat completions by a strategy; pause, resume and reload keep their meaning without a model."""

    def __init__(self, strategy: Strategy, tokenizer: Any, *, max_context: int, name: str = "scripted") -> None:
        self.strategy, self.tokenizer, self.max_context, self.name = strategy, tokenizer, max_context, name
        self.version = self.generation = 0
        self._stale = False
        self._open: asyncio.Event | None = None

    def app(self) -> App:
        app = App(
            {
                ("POST", "/v1/chat/completions"): self.chat,
                ("GET", "/v1/models"): self.models,
                ("GET", "/health"): self.health,
                ("POST", "/pause"): self.pause,
                ("POST", "/resume"): self.resume,
                ("GET", "/is_paused"): self.is_paused,
                ("POST", "/collective_rpc"): self.collective_rpc,
                ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            }
        )
        app.on_start = self._start
        return app

    def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @property
    def gate(self) -> asyncio.Event:
        assert self._open is not None, "the application has not started"
        return self._open

    async def chat(self, body: dict[str, Any]) -> Reply:
        options, messages = parse_options(body, chat=True), parse_messages(body)
        await self.gate.wait()
        prompt = self.tokenizer.prompt(messages)
        limit = room(len(prompt), self.max_context, options.max_tokens)
        seed = seed_of(options.seed, options.user, messages)
        samples = []
        for i in range(options.n):
            text = self.strategy.reply(messages, seed + i)
            ids = self.tokenizer.reply(text)
            if len(ids) > limit:
                raise RequestError(400, "context_length_exceeded", f"the scripted reply needs {len(ids)} tokens")
            samples.append(Sample(ids, [0.0] * len(ids), text, "stop"))
        headers = {"x-swel-weight-version": str(self.version)}
        return 200, chat_reply(self.name, prompt, samples, options, self.tokenizer.piece), headers

    async def models(self, body: dict[str, Any]) -> Reply:
        entry = {"id": self.name, "object": "model", "owned_by": "swe-lightning", "max_model_len": self.max_context}
        return 200, {"object": "list", "data": [entry]}, {}

    async def health(self, body: dict[str, Any]) -> Reply:
        return 200, {"status": "ok", "paused": not self.gate.is_set(), "version": self.version}, {}

    async def pause(self, body: dict[str, Any]) -> Reply:
        self.gate.clear()
        return 200, {"is_paused": True}, {}

    async def resume(self, body: dict[str, Any]) -> Reply:
        if self._stale:
            raise RequestError(409, "conflict", "weights were loaded but the prefix cache was not reset")
        self.gate.set()
        return 200, {"is_paused": False}, {}

    async def is_paused(self, body: dict[str, Any]) -> Reply:
        return 200, {"is_paused": not self.gate.is_set()}, {}

    async def collective_rpc(self, body: dict[str, Any]) -> Reply:
        if body.get("method") != "reload_weights":
            raise RequestError(
                400, "unknown_method", f"collective_rpc: only reload_weights, not {body.get('method')!r}"
            )
        if self.gate.is_set():
            raise RequestError(409, "conflict", "pause before loading weights")
        version = (body.get("kwargs") or {}).get("version")
        self.version = self.version + 1 if version is None else version
        self._stale = True
        return 200, {"results": [None], "version": self.version}, {}

    async def reset_prefix_cache(self, body: dict[str, Any]) -> Reply:
        self.generation += 1
        self._stale = False
        return 200, {"success": True, "generation": self.generation}, {}


def serve_scripted(
    strategy: str, tokenizer_dir: Path | None, *, host: str, port: int, max_context: int = 32768
) -> None:
    """Serve a named strategy until SIGTERM. Raises UserError (strategy, file), BusyError (port)."""
    chosen = make_strategy(strategy)
    tokenizer = DirectoryTokenizer(tokenizer_dir) if tokenizer_dir else ByteTokenizer()
    sock = bind(host, port)
    run(ScriptedServer(chosen, tokenizer, max_context=max_context).app(), sock)
