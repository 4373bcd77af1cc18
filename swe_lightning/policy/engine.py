"""Continuous batching over one transformers model, in one thread that owns model and cache.

Each step feeds one packed row of tokens: the last sampled token of every running sequence and the next chunk of every
prompt that is still being read. Invariants: a sequence never mixes weights (they change only while nothing runs), and
a log-probability is that of the distribution the token was drawn from. Whatever asks for an idle engine (pause, load,
reset) stops admission until it has been served, so it never starves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swe_lightning.errors import UserError
from swe_lightning.policy.kvcache import Block, KVCache, Plan, make_block
from swe_lightning.policy.sampling import Sampling, draw
from swe_lightning.policy.weights import load_into

PREFILL_TOKENS = 1024
"""Prompt tokens per step: bounds how long running sequences wait for newcomers."""
SHARED_PREFIX_TOKENS = 16
"""A prompt waits one step if a neighbour is just computing at least this much of its prefix."""


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to sample. `stop` decides after each token (ids so far -> True ends it)."""

    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stop: Callable[[list[int]], bool] | None = None
    owner: Any = None
    """Whatever `deliver` needs to find the waiting caller."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    """stop, length, abort or error."""
    error: str = ""
    version: int = 0
    generation: int = 0
    reused: int = 0
    aborted: bool = False


class Engine:
    """Submit jobs from any thread; control calls return once they have taken effect."""

    def __init__(
        self,
        model: Any,
        *,
        max_context: int,
        max_batch: int,
        cache_mb: int,
        version: int = 0,
        deliver: Callable[[list[Job]], None] | None = None,
    ) -> None:
        config = model.config
        self.model, self.max_context, self.version = model, max_context, version
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row_bytes = 8 * config.num_hidden_layers * max_context * kv_heads * head_dim
        rows = min(2 * max_batch, max(1, cache_mb * 2**20 // row_bytes))
        self.max_batch = min(max_batch, rows)
        self.cache = KVCache(
            layers=config.num_hidden_layers, rows=rows, context=max_context, kv_heads=kv_heads, head_dim=head_dim
        )
        self._groups = config.num_attention_heads // kv_heads
        self.deliver = deliver or (lambda jobs: None)
        self._jobs: list[Job] = []
        self._decoding = 0
        self._waiting: deque[Job] = deque()
        self._control: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._paused = False
        self._draining = 0
        self._stale = False
        self._stopped = False
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- from other threads -------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        with self._wake:
            self._waiting.append(job)
            self._wake.notify()

    def abort(self, job: Job) -> None:
        with self._wake:
            job.aborted = True
            self._wake.notify()

    def pause(self, *, abort: bool = False) -> Future[None]:
        """Admit nothing more; resolved when what runs has finished (or was aborted)."""
        with self._wake:
            self._paused = True
            for job in list(self._jobs) if abort else []:
                job.aborted = True
        return self._when_idle(lambda: None)

    def resume(self) -> Future[None]:
        def act() -> None:
            if self._stale:
                raise UserError("weights were loaded but the prefix cache was not reset: call reset_prefix_cache first")
            self._paused = False

        return self._soon(act)

    def reload(self, directory: Path, version: int | None) -> Future[int]:
        """Copy the weights in `directory` into the model in place. Only while paused; all or nothing."""

        def act() -> int:
            if not self._paused:
                raise UserError("pause before loading weights: running sequences must not mix versions")
            load_into(self.model, directory)
            self.version = self.version + 1 if version is None else version
            self._stale = True
            return self.version

        return self._when_idle(act)

    def reset_cache(self) -> Future[int]:
        def act() -> int:
            self.cache.reset()
            self._stale = False
            return self.cache.generation

        return self._when_idle(act)

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) sequences."""
        return len(self._jobs), len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=30)

    def _soon(self, act: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting must not be able to cancel it
        with self._wake:
            self._control.append((act, done))
            self._wake.notify()
        return done

    def _when_idle(self, act: Callable[[], Any]) -> Future[Any]:
        def once_idle() -> Any:
            if self._jobs:
                return _LATER
            self._draining -= 1
            return act()

        with self._wake:
            self._draining += 1
        return self._soon(once_idle)

    # -- the engine thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not (self._stopped or self._has_work()):
                        self._wake.wait()
                    if self._stopped:
                        return
                    controls, self._control = self._control, deque()
                for act, done in controls:
                    if _settle(act, done) is _LATER:
                        self._control.append((act, done))
                finished = self._drop_aborted()
                if not (self._paused or self._draining):
                    self._admit()
                if self._jobs:
                    try:
                        finished += self._step()
                    except Exception as error:
                        finished += self._fail_all(error)
                if finished:
                    self.deliver(finished)

    def _has_work(self) -> bool:
        return bool(
            self._jobs
            or self._control
            or (self._waiting and not self._paused)
            or any(job.aborted for job in self._waiting)
        )

    def _drop_aborted(self) -> list[Job]:
        dropped = []
        for row in reversed(range(len(self._jobs))):
            if self._jobs[row].aborted:
                dropped.append(self._close(row, "abort"))
        with self._wake:
            if any(job.aborted for job in self._waiting):
                gone = [job for job in self._waiting if job.aborted]
                self._waiting = deque(job for job in self._waiting if not job.aborted)
                for job in gone:
                    job.finish = "abort"
                dropped += gone
        return dropped

    def _admit(self) -> None:
        pending = sum(len(j.prompt) - int(self.cache.length[r]) for r, j in self._reading())
        skipped: list[Job] = []
        while self._waiting and len(self._jobs) < self.max_batch and pending < PREFILL_TOKENS:
            with self._wake:
                job = self._waiting.popleft()
            row = len(self._jobs)
            if self.cache.promised(job.prompt, self._decoding, row) >= SHARED_PREFIX_TOKENS:
                skipped.append(job)
                continue
            job.reused = self.cache.open(row, job.prompt, row)
            job.version, job.generation = self.version, self.cache.generation
            self._jobs.append(job)
            pending += len(job.prompt) - job.reused
        if skipped:
            with self._wake:
                self._waiting.extendleft(reversed(skipped))

    def _reading(self) -> list[tuple[int, Job]]:
        return list(enumerate(self._jobs))[self._decoding :]

    def _step(self) -> list[Job]:
        self.steps += 1
        cache, decoding = self.cache, self._decoding
        starts = cache.length[: len(self._jobs)].copy()
        chunks = [np.array([job.ids[-1]]) for job in self._jobs[:decoding]]
        budget, ready = PREFILL_TOKENS, list(range(decoding))
        for row, job in self._reading():
            n = int(starts[row])
            chunk = job.prompt[n : n + max(budget, 1)]
            budget -= len(chunk)
            chunks.append(chunk)
            if n + len(chunk) == len(job.prompt):
                ready.append(row)
        counts = np.array([len(c) for c in chunks])
        logits = self._forward(chunks, starts, counts, ready)
        for row, chunk in enumerate(chunks):
            cache.append(row, chunk)
        for row in ready[decoding:]:
            self._swap(row, self._decoding)
            self._decoding += 1
        if not ready:
            return []
        # `ready` ascends and promotion moves its rows down in order: row i of the logits is now sequence i.
        tokens, logprobs = draw(logits, [job.sampling for job in self._jobs[: self._decoding]])
        finished = []
        for row in reversed(range(self._decoding)):
            job = self._jobs[row]
            job.ids.append(tokens[row])
            job.logprobs.append(logprobs[row])
            reason = self._finished(job)
            if reason:
                finished.append(self._close(row, reason))
        return finished

    def _forward(
        self, chunks: list[np.ndarray], starts: np.ndarray, counts: np.ndarray, ready: list[int]
    ) -> torch.Tensor:
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + within
        rows = np.repeat(np.arange(len(chunks)), counts)
        plan = Plan(
            self.cache,
            self._blocks(starts, counts, ends),
            torch.from_numpy(rows * self.cache.context + positions),
        )
        out = self.model(
            input_ids=torch.from_numpy(np.concatenate(chunks).astype(np.int64))[None],
            position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(ends[ready] - 1),
            ragged_plan=plan,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _blocks(self, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> list[Block]:
        """The decoding rows, then reading rows cut where padding would exceed the tokens themselves."""
        cuts, first, widest, total = [0], self._decoding, 0, 0
        if 0 < first < len(counts):
            cuts.append(first)
        for row in range(self._decoding, len(counts)):
            width = max(widest, int(counts[row]))
            if total and width * (row - first + 1) > 2 * (total + counts[row]) + 64:
                cuts.append(row)
                first, width, total = row, int(counts[row]), 0
            widest, total = width, total + int(counts[row])
        cuts.append(len(counts))
        return [
            make_block(a, starts[a:b], counts[a:b], int(ends[a] - counts[a]), self._groups) for a, b in pairwise(cuts)
        ]

    def _finished(self, job: Job) -> str | None:
        if job.ids[-1] in job.stop_ids or (job.stop is not None and job.stop(job.ids)):
            return "stop"
        if len(job.ids) >= job.max_tokens or len(job.prompt) + len(job.ids) >= self.max_context:
            return "length"
        return None

    def _close(self, row: int, reason: str) -> Job:
        """Take a sequence out; its keys and values stay for a later turn."""
        job = self._jobs[row]
        job.finish = reason
        self.cache.touch(row)
        self.cache.tokens[row, self.cache.length[row] :] = -1
        if row < self._decoding:
            self._decoding -= 1
            self._swap(row, self._decoding)
            row = self._decoding
        self._swap(row, len(self._jobs) - 1)
        self._jobs.pop()
        return job

    def _swap(self, a: int, b: int) -> None:
        self.cache.swap(a, b)
        self._jobs[a], self._jobs[b] = self._jobs[b], self._jobs[a]

    def _fail_all(self, error: Exception) -> list[Job]:
        """A step that failed says nothing about which sequence caused it: all of them end, the cache is dropped."""
        failed = [self._close(row, "error") for row in reversed(range(len(self._jobs)))]
        for job in failed:
            job.error = f"{type(error).__name__}: {error}"
        self.cache.reset()
        return failed


_LATER = object()


def _settle(act: Callable[[], Any], done: Future[Any]) -> Any:
    try:
        result = act()
    except Exception as error:
        done.set_exception(error)
        return None
    if result is not _LATER:
        done.set_result(result)
    return result
