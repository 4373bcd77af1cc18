"""Warm-start data from the stand-in: demonstrations as texts (for the tokenizer) and as rows (for training).

A row is one whole conversation; mask 1 on what the demonstrator said, end token included, found by the template's own
marker tokens and never by searching text. Log-probs are 0.0: these tokens were scripted, not sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from swe_lightning.errors import DataError
from swe_lightning.policy.demonstrator import Demonstrator
from swe_lightning.policy.standin import Messages, bugs, play
from swe_lightning.policy.tiny import END
from swe_lightning.records import Row


def conversations(n: int, seed: int) -> Iterator[Messages]:
    """`n` demonstrations on bugs of the standard library; the i-th depends on (seed, i) only."""
    strategy = Demonstrator()
    for i, bug in zip(range(n), bugs(seed), strict=False):
        yield play(bug, strategy, seed * 1_000_000 + i)[0]


def bulk_texts(n: int, seed: int) -> list[str]:
    """What `create_tiny(texts=...)` learns its merges from: the contents of `n` demonstrations."""
    return [message["content"] for messages in conversations(n, seed) for message in messages]


def standin_rows(tokenizer: Any, n: int, seed: int) -> list[Row]:
    """`n` demonstrations as training rows. DataError unless the tokenizer is one of ours (`create_tiny`)."""
    texts = [render(tokenizer, messages) for messages in conversations(n, seed)]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [row_of(tokenizer, e.ids, f"demo-{seed}-{i}") for i, e in enumerate(encoded)]


def render(tokenizer: Any, messages: Messages) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


def row_of(tokenizer: Any, ids: list[int], rollout_id: str) -> Row:
    """Mask from the marker tokens: everything after `<|assistant|>` up to and including `<|end|>`."""
    start, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.convert_tokens_to_ids(END)
    if start is None or end is None or start == tokenizer.unk_token_id:
        raise DataError("demonstration rows need a tokenizer of create_tiny (its turn markers are missing)")
    array = np.array(ids, np.int32)
    mask = np.zeros(len(array), np.int8)
    ends = np.flatnonzero(array == end)
    for at in np.flatnonzero(array == start):
        later = ends[ends > at]
        if len(later):
            mask[at + 1 : later[0] + 1] = 1
    return Row(array, mask, np.zeros(len(array), np.float32), rollout_id, group_id=rollout_id)
