"""A scripted agent that does not know the fix: it looks, guesses an edit, often tests, sometimes forgets to undo.

It is a pure function of the conversation and a seed: all it knows it reads back from its own commands and what they
printed, and its dice for a turn depend on (seed, turn) only. So the same demonstration comes out of the stand-in and
of the real path through gateway, harness and sandbox. It leaves something to learn on purpose.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swe_lightning.policy.edits import EDITS, Edit, applicable

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LOOK = "sed -n ${L}p $F"
TEST = "sh test.sh"
UNDO = "sh undo.sh"

_BLOCK = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)
_PASSED = re.compile(r"^\d+ passed")


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the demonstrator does."""

    look: float = 0.8
    """Looks at the line first."""
    fit: float = 0.8
    """Chooses an edit that applies to the line it saw (else any edit of the set)."""
    test: float = 0.5
    """Runs the tests after an edit."""
    undo: float = 0.6
    """Undoes before the next edit."""
    stop_pass: float = 0.75
    """Submits after tests that pass."""
    stop_fail: float = 0.4
    """Submits after tests that fail or were not run."""
    max_turns: int = 8


def block(command: str) -> str:
    """A reply of the form the harness parses."""
    return f"```bash\n{command}\n```"


def edit_command(edit: Edit) -> str:
    return f'sed -i "${{L}}s/{edit[0]}/{edit[1]}/" $F'


def command_of(reply: str) -> str | None:
    """The command of a reply, None unless there is exactly one block."""
    found = _BLOCK.findall(reply)
    return found[0].strip() if len(found) == 1 else None


@dataclass(slots=True)
class Story:
    """What a conversation tells about its own past."""

    turns: int = 0
    line: str | None = None
    edits: int = 0
    tested: bool = False
    passed: bool = False


def read(messages: Sequence[Mapping[str, Any]]) -> Story:
    """The story so far; `tested` and `passed` are about the last command."""
    story = Story()
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        story.turns += 1
        command = command_of(message["content"]) or ""
        output = messages[i + 1]["content"] if i + 1 < len(messages) else ""
        story.tested = command.endswith(TEST)
        story.passed = story.tested and bool(_PASSED.match(output))
        if command == LOOK and story.edits == 0:
            story.line = output
        elif "sed -i" in command:
            story.edits += 1
    return story


class Demonstrator:
    """The strategy `demonstrator` of the scripted server."""

    def __init__(self, habits: Habits | None = None) -> None:
        self.habits = habits or Habits()

    def reply(self, messages: Sequence[Mapping[str, Any]], seed: int) -> str:
        return block(self.command(read(messages), seed))

    def command(self, story: Story, seed: int) -> str:
        h, dice = self.habits, random.Random(seed * 1_000_003 + story.turns)
        if story.turns == 0 and dice.random() < h.look:
            return LOOK
        if story.turns >= h.max_turns - 1:
            return SUBMIT
        if story.edits and dice.random() < (h.stop_pass if story.passed else h.stop_fail):
            return SUBMIT
        fitting = applicable(story.line) if story.line is not None else []
        edit = dice.choice(fitting) if fitting and dice.random() < h.fit else dice.choice(EDITS)
        parts = [edit_command(edit)]
        if story.edits and dice.random() < h.undo:
            parts.insert(0, UNDO)
        if dice.random() < h.test:
            parts.append(TEST)
        return "; ".join(parts)
