"""What a model is told of a bug so that it can write an issue, and what its text may not give away.

The model sees how the bug behaves: the output of the failing tests, lines of the bug and of its fix blanked out. A text
is refused if it shows such a line all the same, holds a diff, names the tests that judge the repair, is cut or is no
issue. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

OUTPUT_CHARS = 6000
MIN_CHARS, MAX_CHARS = 60, 8000
SHORTEST_LINE = 8
"""Shorter lines of a patch (`else:`) may stand in any text."""
_MARKS = re.compile(r"^(diff --git |@@ -\d|\+\+\+ [ab]/|--- [ab]/|index [0-9a-f]{7,}\.\.)", re.M)
_THOUGHTS = re.compile(r"^.*?</think>", re.S)

SYSTEM = """\
You write bug reports for open-source projects. You report as a user of the project who met a problem: you know what \
you did, what you expected and what you got. You have not looked for the cause and you do not know the fix."""

REQUEST = """\
Project: {package} {version}

Something in this project is broken. This is what its test suite says:

{output}

Write the bug report. The first line is a short title, then an empty line, then the report in Markdown: what goes \
wrong, a minimal example of your own that shows it if you can make one, what you expected, and what happens instead.

Rules:
- Describe behaviour only. Do not say which line, operator or condition is wrong, and propose no change.
- Quote no source code of the project and no diff.
- Do not mention the test suite, test names or test files: users do not run them.
- Answer with the report alone."""

AGAIN = """\
That report cannot be used: {why}. Write it again, under the same rules."""
WHY = {
    "issue_empty": "it is empty or too short",
    "issue_cut": "it was cut off; be shorter",
    "issue_leaks": "it shows lines of the project's source, or a diff",
    "issue_names_tests": "it names the tests",
}
"""Reason code -> what the model is told."""


def request(package: str, version: str, output: str, secret: Sequence[str]) -> list[dict[str, str]]:
    """The conversation to send. `secret`: lines of the bug and of its fix."""
    shown = blank(output, secret)
    if len(shown) > OUTPUT_CHARS:
        shown = "[...]\n" + shown[-OUTPUT_CHARS:]
    fence = "```" if "```" not in shown else "~~~~"
    text = REQUEST.format(package=package, version=version, output=f"{fence}\n{shown.strip()}\n{fence}")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def again(messages: Sequence[dict[str, str]], answer: str, reason: str) -> list[dict[str, str]]:
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": AGAIN.format(why=WHY[reason])},
    ]


def blank(output: str, secret: Sequence[str]) -> str:
    """The output, its lines that show a line of the bug or of the fix blanked out."""
    wanted = significant(secret)
    lines = output.splitlines()
    return "\n".join("[...]" if any(line in squeeze(one) for line in wanted) else one for one in lines)


def clean(answer: str) -> str:
    """The text without the model's thoughts and without a fence around all of it."""
    text = _THOUGHTS.sub("", answer).strip()
    if text.startswith("<think>"):
        return ""  # it never came to the report
    fenced = re.fullmatch(r"```(?:markdown|md)?\n(.*)\n```", text, re.S)
    return (fenced[1] if fenced else text).strip()


def fault(text: str, secret: Sequence[str], failing: Sequence[str]) -> str | None:
    """Reason code if the text may not be used."""
    if len(squeeze(text)) < MIN_CHARS:
        return "issue_empty"
    if len(text) > MAX_CHARS:
        return "issue_cut"
    flat = squeeze(text)
    if _MARKS.search(text) or any(line in flat for line in significant(secret)):
        return "issue_leaks"
    names = {part for test in failing for part in (test, test.split("::")[0], test.split("[")[0].rsplit("::", 1)[-1])}
    if any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names):
        return "issue_names_tests"
    return None


def secret_lines(patch: str) -> list[str]:
    """Lines that a patch adds or takes away."""
    return [line[1:] for line in patch.splitlines() if line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- "))]


def significant(lines: Sequence[str]) -> list[str]:
    squeezed = (squeeze(line) for line in lines)
    return [line for line in dict.fromkeys(squeezed) if len(line) >= SHORTEST_LINE and re.search(r"\W", line)]


def squeeze(text: str) -> str:
    return " ".join(text.split())
