"""Reward shaping: what training may take off a solved rollout for being long. Never part of the verdict.

Both penalties are those of the coding example of Agent Lightning v1.0: a linear ramp over the turns, another over the
longest prompt, only where the task is solved, so that failures keep every freedom to explore. Off unless a recipe asks
(`reward:`), and never applied to validation, whose reward has to stay comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_lightning.recipe import Reward


@dataclass(frozen=True)
class Shaped:
    """`value` = raw reward - `turns` - `context`."""

    value: float
    turns: float = 0.0
    context: float = 0.0


def shape(
    raw: float, section: Reward, *, mode: str, turns: int, turn_limit: int, longest_prompt_tokens: int
) -> Shaped | None:
    """The shaped reward of one rollout, or None where nothing is shaped (validation, or no penalty configured)."""
    if mode != "train" or not section.active:
        return None
    if raw < 1.0:
        return Shaped(raw)
    by_turns = section.turn_penalty * _ramp(turns, section.free_turns, turn_limit)
    by_context = section.context_penalty * _ramp(
        longest_prompt_tokens, section.free_context_tokens, section.full_context_tokens
    )
    return Shaped(raw - by_turns - by_context, by_turns, by_context)


def _ramp(value: float, start: float, end: float) -> float:
    """0 up to `start`, 1 from `end` on, linear between."""
    if value <= start:
        return 0.0
    return min((value - start) / max(end - start, 1), 1.0)
