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
from collections.abc import Iterator
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

_FILES = 160
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


@lru_cache(maxsize=4)
def library_bugs(seed: int, files: int = _FILES) -> tuple[tuple[Bug, ...], ...]:
    """Bugs that one edit of the set repairs, in one tuple per repairing edit; seeded, from the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    if not sources:
        raise DataError(f"no Python sources under {root}; the warm start reads its lines from the standard library")
    rng = random.Random(seed)
    found: dict[Edit, list[Bug]] = {edit: [] for edit in EDITS}
    names: list[str] = []
    for path in rng.sample(sources, min(files, len(sources))):
        try:
            source = path.read_text(encoding="utf-8")
            functions = _functions(source)
        except (ValueError, SyntaxError):
            continue
        names += [part for name in set(functions.values()) for part in name.strip("_").split("_") if part.isalpha()]
        for number, line in enumerate(source.split("\n"), 1):
            if number in functions and _usable(line):
                for edit, broken in _breakages(line):
                    found[edit].append(
                        _bug(functions[number], str(path.relative_to(root)), number, line, broken, names, rng)
                    )
    return tuple(tuple(bugs) for bugs in found.values() if bugs)


def bugs(seed: int) -> Iterator[Bug]:
    """Endless bugs; every kind of repair is about equally frequent, whatever the library holds of it."""
    kinds, rng = library_bugs(seed), random.Random(seed + 1)
    weights = [min(len(kind), 120) for kind in kinds]
    while True:
        yield rng.choice(rng.choices(kinds, weights)[0])


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


def _bug(func: str, path: str, number: int, line: str, broken: str, names: list[str], rng: random.Random) -> Bug:
    """Names, paths and numbers are varied: the policy must not learn the library's own."""
    if rng.random() < 0.7:
        parts = [_name(names, rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        path = "/".join([*parts, _name(names, rng) + ".py"])
    tests = rng.choice((1, 1, 2, 3, 5))
    failure = f"{tests} failed\n" if tests == 1 or rng.random() < 0.8 else f"1 failed, {tests - 1} passed\n"
    return Bug(
        func=func,
        path=path,
        number=number if rng.random() < 0.5 else rng.randint(1, 4000),
        test="test_" + _name(names, rng),
        original=line,
        broken=broken,
        tests=tests,
        failure=failure,
    )


def _name(names: list[str], rng: random.Random) -> str:
    def word() -> str:
        if names and rng.random() < 0.7:
            return rng.choice(names)
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))

    return "_".join(word() for _ in range(rng.choice((1, 1, 1, 2))))
