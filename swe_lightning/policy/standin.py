"""A fast stand-in for the sandbox, good for one line of code: broken lines of CPython's own library, played in memory.

It answers the commands of the tiny policy's dialect byte for byte as bash, sed and the recipe's scripts would, except
that tests are simulated: they pass exactly if the line equals the original. Demonstrations for the warm start come
from here; what is learnt and measured later runs in real sandboxes. No text is shipped: the lines are read from the
running interpreter's library.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from swe_lightning.errors import DataError
from swe_lightning.policy.demonstrator import LOOK, SUBMIT, TEST, UNDO, Demonstrator, block, command_of, read
from swe_lightning.policy.edits import EDITS, Edit, apply

SYSTEM = "Fix the bug with bash."
ISSUE = "{test} fails. Bug in {func}, F={path} L={line}."
OBSERVATION_CHARS = 120
"""These three are the prompts of recipes/tiny_cpu.yaml; a test compares them."""

Messages = list[dict[str, str]]

_FILES = 120
_SED = re.compile(r'sed -i "\$\{L\}s/([^/"`$\\]+)/([^/"`$\\]*)/" \$F')
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Bug:
    """One broken line and where the agent is told it is. `failure` is what the tests print while it is broken."""

    func: str
    path: str
    number: int
    test: str
    original: str
    broken: str
    tests: int
    failure: str

    @property
    def issue(self) -> str:
        return ISSUE.format(test=self.test, func=self.func, path=self.path, line=self.number)


class Shell:
    """The agent's shell on one line of one file."""

    def __init__(self, bug: Bug) -> None:
        self.bug, self.line = bug, bug.broken

    @property
    def solved(self) -> bool:
        return self.line == self.bug.original

    def run(self, command: str) -> str:
        return "".join(self._one(part) for part in command.split("; "))

    def _one(self, command: str) -> str:
        if command == LOOK:
            return self.line + "\n"
        if command == TEST:
            return f"{self.bug.tests} passed\n" if self.solved else self.bug.failure
        if command == UNDO:
            self.line = self.bug.broken
            return ""
        if command == SUBMIT:
            return command.removeprefix("echo ") + "\n"
        edit = _SED.fullmatch(command)
        if edit:
            self.line = apply(self.line, (edit[1], edit[2]))
            return ""
        return f"bash: line 1: {command.split(' ')[0]}: command not found\n"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A line of the library and what it looks like broken."""

    func: str
    path: str
    number: int
    original: str
    broken: str


@lru_cache(maxsize=4)
def library(seed: int, files: int = _FILES) -> tuple[tuple[tuple[Candidate, ...], ...], tuple[str, ...]]:
    """Candidates that one edit of the set repairs, in one tuple per repairing edit, and words of function names.

    A seeded sample of the standard library's files. DataError where the interpreter has none on disk.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests"}
    sources = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    if not sources:
        raise DataError(f"no Python sources under {root}; the warm start reads its lines from the standard library")
    found: dict[Edit, list[Candidate]] = {edit: [] for edit in EDITS}
    words: list[str] = []
    for path in random.Random(seed).sample(sources, min(files, len(sources))):
        try:
            source = path.read_text(encoding="utf-8")
            functions = _functions(source)
        except (ValueError, SyntaxError):
            continue
        words += (w for name in sorted(set(functions.values())) for w in name.strip("_").split("_") if w.isalpha())
        for number, line in enumerate(source.split("\n"), 1):
            if number in functions and _usable(line):
                for edit, broken in _breakages(line):
                    place = str(path.relative_to(root))
                    found[edit].append(Candidate(functions[number], place, number, line, broken))
    return tuple(tuple(kind) for kind in found.values() if kind), tuple(words)


def bugs(seed: int) -> Iterator[Bug]:
    """Endless bugs; the kinds of repair are about equally frequent, whatever the library holds of them."""
    kinds, words = library(seed)
    rng = random.Random(seed + 1)
    weights = [min(len(kind), 120) for kind in kinds]
    while True:
        yield _bug(rng.choice(rng.choices(kinds, weights)[0]), words, rng)


def play(bug: Bug, strategy: Demonstrator, seed: int, max_turns: int = 8) -> tuple[Messages, Shell]:
    """A whole conversation as the harness would hold it, ending in the reply that submits (or the last turn's)."""
    messages: Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": bug.issue}]
    shell = Shell(bug)
    for turn in range(max_turns):
        command = strategy.command(read(messages), seed)
        messages.append({"role": "assistant", "content": block(command)})
        if command == SUBMIT or turn == max_turns - 1:
            break
        messages.append({"role": "user", "content": shell.run(command)[:OBSERVATION_CHARS]})
    return messages, shell


def answer(shell: Shell, reply: str) -> str | None:
    """Observation for any policy's reply; None where the harness would end (submitted, or no command)."""
    command = command_of(reply)
    if command is None or command == SUBMIT:
        return None
    return shell.run(command)[:OBSERVATION_CHARS]


def _functions(source: str) -> dict[int, str]:
    """Line number -> name of the innermost function that holds it."""
    held: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):  # breadth first: inner functions overwrite outer ones
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                held[number] = node.name
    return held


def _usable(line: str) -> bool:
    return len(line) <= 90 and not line.lstrip().startswith("#") and '"""' not in line


def _breakages(line: str) -> Iterator[tuple[Edit, str]]:
    """(repairing edit, broken line): only where the edit, applied as sed would, gives the original back."""
    for edit in EDITS:
        at = line.find(edit[1])
        if at < 0:
            continue
        broken = line[:at] + edit[0] + line[at + len(edit[1]) :]
        if broken != line and apply(broken, edit) == line:
            yield edit, broken


def _bug(candidate: Candidate, words: Sequence[str], rng: random.Random) -> Bug:
    """Names, paths and numbers are varied: the policy must not learn the library's own."""
    path, number = candidate.path, candidate.number
    if rng.random() < 0.7:
        parts = [_name(words, rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        path = "/".join([*parts, _name(words, rng) + ".py"])
    if rng.random() < 0.5:
        number = rng.randint(1, 4000)
    tests = rng.choice((1, 1, 2, 3, 5))
    failure = f"{tests} failed\n" if tests == 1 or rng.random() < 0.8 else f"1 failed, {tests - 1} passed\n"
    test = "test_" + _name(words, rng)
    return Bug(candidate.func, path, number, test, candidate.original, candidate.broken, tests, failure)


def _name(words: Sequence[str], rng: random.Random) -> str:
    def word() -> str:
        if words and rng.random() < 0.7:
            return rng.choice(words)
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))

    return "_".join(word() for _ in range(rng.choice((1, 1, 1, 2))))
