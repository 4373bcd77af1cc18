"""The closed set of one-line repairs that the small demonstration policy may choose from.

A repair is a text edit as `sed 's/pattern/replacement/'` makes it: the first match on the line. A bug belongs to the
demonstration only if some repair of this set turns its line back into the original, exactly.
"""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    pattern: str
    replacement: str


_BOTH_WAYS = [
    ("==", "!="),
    (" and ", " or "),
    (" in ", " not in "),
    (" is ", " is not "),
    ("if ", "if not "),
    ("True", "False"),
    (" + ", " - "),
    (" < ", " <= "),
    (" > ", " >= "),
    (" < ", " > "),
    ("0", "1"),
    ("1", "2"),
    ("return ", "return not "),
    (" += ", " -= "),
    ("any(", "all("),
    ("startswith", "endswith"),
    ("min(", "max("),
    ("break", "continue"),
]

EDITS: tuple[Edit, ...] = tuple(Edit(*pair) for a, b in _BOTH_WAYS for pair in ((a, b), (b, a)))


def repair(mutated: str, original: str) -> Edit | None:
    """The first edit of the set that restores the line, or None."""
    if mutated == original:
        return None
    for edit in EDITS:
        if edit.pattern in mutated and mutated.replace(edit.pattern, edit.replacement, 1) == original:
            return edit
    return None
