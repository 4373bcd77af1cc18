"""Issue texts for synthetic bugs: what a maintainer would write who sees a test fail and has not looked at the code.

The text may name the failing tests and the function that they point to; it never holds a line of the package, neither
the broken nor the original one. Chosen by the instance id, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_OPENINGS = (
    "`{function}` in `{module}` gives wrong results",
    "Regression in `{module}`: `{function}` misbehaves",
    "Tests around `{function}` ({module}) started to fail",
    "Unexpected behaviour of `{function}` since the last change to `{module}`",
)
_BODIES = (
    "After a recent change to {package}, {count} that used to pass {verb} now. {named}\n\n"
    "All of them go through `{function}` in `{file}`. The other tests of the same files still pass, so the damage "
    "seems to be local to that function.",
    "I updated my checkout of {package} and ran the tests. {named} The failure appears every time, on a clean checkout "
    "and without any change of mine.\n\nStepping through it, the values are fine up to `{function}` (`{file}`) and "
    "wrong afterwards.",
    "`{function}` no longer does what its tests and its documentation say. {named}\n\nExpected: the behaviour the "
    "tests describe, as in {release}.\nActual: {count} {verb}.",
)


def issue_text(
    instance_id: str,
    *,
    package: str,
    release: str,
    functions: Sequence[str],
    files: Sequence[str],
    failing: Sequence[str],
) -> str:
    """One heading, a blank line, two short paragraphs. `release`: what worked, as words.

    Functions and files of several bugs are named once each.
    """
    function, file = (_joined(names) for names in (functions, files))
    number = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:4], "big")
    names = [f"`{test}`" for test in failing[:3]]
    more = len(failing) - len(names)
    named = f"It shows in {', '.join(names)}" + (f" and {more} more." if more > 0 else ".")
    words = {
        "package": package,
        "release": release,
        "function": function,
        "file": file,
        "module": _joined([name.removesuffix(".py").rsplit("/", 1)[-1] for name in files]),
        "count": f"{len(failing)} tests" if len(failing) > 1 else "a test",
        "verb": "fail" if len(failing) > 1 else "fails",
        "named": named,
    }
    opening = _OPENINGS[number % len(_OPENINGS)]
    body = _BODIES[(number // len(_OPENINGS)) % len(_BODIES)]
    return f"{opening}\n\n{body}\n".format(**words)


def _joined(names: Sequence[str]) -> str:
    """The templates put names in backticks, so the words between them leave the backticks again."""
    *first, last = dict.fromkeys(names)
    return f"{'`, `'.join(first)}` and `{last}" if first else last
