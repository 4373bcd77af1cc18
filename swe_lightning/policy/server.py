"""The embedded OpenAI-compatible server: chat and text completions over the engine, vLLM's reply layout and controls.

Prompts are rendered and tokenised here and nowhere else; the reply carries the ids that were fed and the ids that were
sampled. While paused, new requests wait. Weight changes follow pause, reload_weights, reset_prefix_cache, resume; a
resume that skipped the reset is refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swe_lightning.errors import MissingPart, UserError
from swe_lightning.policy.app import App, Reply, bind, run
from swe_lightning.policy.wire import (
    Options,
    RequestError,
    Sample,
    chat_reply,
    completion_reply,
    parse_messages,
    parse_options,
    room,
)

if TYPE_CHECKING:
    from swe_lightning.policy.engine import Engine, Job

MAX_WAITING = 8192
"""Requests held beyond this are refused with 429: nothing is dropped silently."""


def serve(
    *,
    model_dir: Path,
    host: str,
    port: int,
    threads: int = 1,
    version: int = 0,
    max_context: int | None = None,
    max_batch: int = 128,
    cache_mb: int = 2048,
    name: str = "policy",
) -> None:
    """Serve the model in `model_dir` until SIGTERM. Raises BusyError (port), MissingPart (torch), UserError (model)."""
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{model_dir} holds no model (config.json is missing)")
    sock = bind(host, port)
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingPart(
            "the embedded server needs torch and transformers: pip install 'swe-lightning[train]'"
        ) from error
    from swe_lightning.policy.engine import Engine
    from swe_lightning.policy.weights import load_model, load_tokenizer

    torch.set_num_threads(threads)
    sys.setswitchinterval(0.0005)  # the engine thread and the event loop hand over often; 5 ms would be one step
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir)
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    if max_context is not None and limit and max_context > limit:
        raise UserError(f"max_context {max_context} is above the model's {limit} positions")
    engine = Engine(
        model, max_context=max_context or limit or 2048, max_batch=max_batch, cache_mb=cache_mb, version=version
    )
    run(Server(engine, tokenizer, name=name, eos_ids=eos_ids(model, tokenizer)).app(), sock)


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens of generation config, model config and tokenizer together."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    return frozenset(found)


class Server:
    """Routes of the embedded server; runs in the event loop, the engine in its own thread."""

    def __init__(self, engine: Engine, tokenizer: Any, *, name: str, eos_ids: frozenset[int]) -> None:
        self.engine, self.tokenizer, self.name, self.eos_ids = engine, tokenizer, name, eos_ids
        self.encode = encoder(tokenizer)
        self._pieces: dict[int, str] = {}

    def app(self) -> App:
        app = App(
            {
                ("POST", "/v1/chat/completions"): self.chat,
                ("POST", "/v1/completions"): self.complete,
                ("GET", "/v1/models"): self.models,
                ("GET", "/health"): self.health,
                ("POST", "/pause"): self.pause,
                ("POST", "/resume"): self.resume,
                ("GET", "/is_paused"): self.is_paused,
                ("POST", "/collective_rpc"): self.collective_rpc,
                ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            }
        )
        app.on_start, app.on_stop = self._connect, self.engine.close
        return app

    # -- completions --------------------------------------------------------------------------------------------

    async def chat(self, body: dict[str, Any]) -> Reply:
        options, messages = parse_options(body, chat=True), parse_messages(body)
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=body.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:
            raise RequestError(400, "chat_template", f"the chat template refused the messages: {error}") from error
        return await self._sample(self.encode(text), options, chat_reply)

    async def complete(self, body: dict[str, Any]) -> Reply:
        options, prompt = parse_options(body, chat=False), body.get("prompt")
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        elif isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            vocabulary = self.engine.model.config.vocab_size
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise RequestError(400, "invalid_prompt", f"token ids must lie in [0, {vocabulary})")
            ids = prompt
        else:
            raise RequestError(400, "invalid_prompt", "prompt must be a string or a list of token ids")
        return await self._sample(ids, options, completion_reply)

    async def _sample(self, ids: list[int], options: Options, reply: Callable[..., Any]) -> Reply:
        if not ids:
            raise RequestError(400, "invalid_prompt", "the prompt has no tokens")
        limit = room(len(ids), self.engine.max_context, options.max_tokens)
        if self.engine.load[1] + options.n > MAX_WAITING:
            raise RequestError(429, "overloaded", f"{MAX_WAITING} requests are waiting already; try again later")
        prompt = np.array(ids, np.int32)
        jobs = [self._job(prompt, limit, options, i) for i in range(options.n)]
        for job in jobs:
            self.engine.submit(job)
        try:
            await asyncio.gather(*(job.owner for job in jobs)) if len(jobs) > 1 else await jobs[0].owner
        except asyncio.CancelledError:
            for job in jobs:
                self.engine.abort(job)
            raise
        failed = next((job.error for job in jobs if job.error), None)
        if failed:
            raise RequestError(500, "engine_error", failed)
        samples = [Sample(job.ids, job.logprobs, self._text(job, options), str(job.finish)) for job in jobs]
        headers = {
            "x-swel-weight-version": str(jobs[0].version),
            "x-swel-cache-generation": str(jobs[0].generation),
            "x-swel-reused-tokens": str(jobs[0].reused),
        }
        return 200, reply(self.name, ids, samples, options, self._piece), headers

    def _job(self, prompt: np.ndarray, limit: int, options: Options, index: int) -> Job:
        from swe_lightning.policy.engine import Job
        from swe_lightning.policy.sampling import Sampling

        seed = None if options.seed is None else options.seed + index
        return Job(
            prompt=prompt,
            max_tokens=limit,
            sampling=Sampling(options.temperature, options.top_p, options.top_k, seed),
            stop_ids=frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self.eos_ids),
            stop=self._stop_check(options.stop) if options.stop else None,
            owner=asyncio.get_running_loop().create_future(),
        )

    def _stop_check(self, stops: list[str]) -> Callable[[list[int]], bool]:
        decode = self.tokenizer.decode
        return lambda ids: any(s in decode(ids, skip_special_tokens=True) for s in stops)

    def _text(self, job: Job, options: Options) -> str:
        text: str = self.tokenizer.decode(job.ids, skip_special_tokens=True)
        cuts = [text.index(s) for s in options.stop if s in text]
        return text[: min(cuts)] if cuts else text

    def _piece(self, token: int) -> str:
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = self.tokenizer.decode([token])
        return text

    def _connect(self) -> None:
        loop = asyncio.get_running_loop()

        def resolve(jobs: list[Job]) -> None:
            for job in jobs:
                if not job.owner.done():
                    job.owner.set_result(None)

        def deliver(jobs: list[Job]) -> None:
            loop.call_soon_threadsafe(resolve, jobs)

        self.engine.deliver = deliver

    # -- state and control --------------------------------------------------------------------------------------

    async def models(self, body: dict[str, Any]) -> Reply:
        entry = {"id": self.name, "object": "model", "owned_by": "swe-lightning"}
        return 200, {"object": "list", "data": [{**entry, "max_model_len": self.engine.max_context}]}, {}

    async def health(self, body: dict[str, Any]) -> Reply:
        if not self.engine.alive:
            raise RequestError(503, "engine_dead", "the engine thread has died; restart the server")
        running, waiting = self.engine.load
        state = {"status": "ok", "paused": self.engine.paused, "running": running, "waiting": waiting}
        return 200, {**state, "version": self.engine.version, "steps": self.engine.steps}, {}

    async def pause(self, body: dict[str, Any]) -> Reply:
        """mode wait (default): answered when what runs has finished; abort: what runs ends with finish `abort`."""
        mode = body.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise RequestError(400, "invalid_parameter", f"pause mode {mode!r}: use wait or abort")
        await _engine_call(self.engine.pause(abort=mode == "abort"))
        return 200, {"is_paused": True}, {}

    async def resume(self, body: dict[str, Any]) -> Reply:
        await _engine_call(self.engine.resume())
        return 200, {"is_paused": False}, {}

    async def is_paused(self, body: dict[str, Any]) -> Reply:
        return 200, {"is_paused": self.engine.paused}, {}

    async def collective_rpc(self, body: dict[str, Any]) -> Reply:
        if body.get("method") != "reload_weights":
            raise RequestError(
                400, "unknown_method", f"collective_rpc: only reload_weights, not {body.get('method')!r}"
            )
        arguments = body.get("kwargs") or {}
        path = arguments.get("weights_path")
        if not path:
            raise RequestError(400, "invalid_parameter", "reload_weights needs kwargs.weights_path")
        version = await _engine_call(self.engine.reload(Path(path), arguments.get("version")))
        return 200, {"results": [None], "version": version}, {}

    async def reset_prefix_cache(self, body: dict[str, Any]) -> Reply:
        generation = await _engine_call(self.engine.reset_cache())
        return 200, {"success": True, "generation": generation}, {}


async def _engine_call(done: Future[Any]) -> Any:
    return await asyncio.wrap_future(done)


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids without added special tokens; straight to the fast backend where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda text: backend.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
