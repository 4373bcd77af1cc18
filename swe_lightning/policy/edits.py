"""The closed set of one-line edits that the tiny policy can express: (pattern, replacement), first match on the line.

Every edit is a legal `sed` basic regular expression that matches only itself, so that `str.replace(.., 1)` on the line
and `sed "s/pattern/replacement/"` do the same; the set is closed under inversion as far as one-line bugs go. Pure
data: the task synthesiser, the demonstrator and the stand-in share it.
"""

from __future__ import annotations

Edit = tuple[str, str]

_PAIRS: tuple[Edit, ...] = (
    ("==", "!="),
    (" and ", " or "),
    (" not in ", " in "),
    (" is not ", " is "),
    ("if not ", "if "),
    ("True", "False"),
    (" + ", " - "),
    (" < ", " <= "),
    (" > ", " >= "),
    (" < ", " > "),
    ("0", "1"),
    ("1", "2"),
    ("return not ", "return "),
    (" += ", " -= "),
    ("any(", "all("),
    ("startswith", "endswith"),
    ("min(", "max("),
    ("break", "continue"),
)

EDITS: tuple[Edit, ...] = tuple(edit for a, b in _PAIRS for edit in ((a, b), (b, a)))


def applicable(line: str) -> list[Edit]:
    """Edits whose pattern occurs in `line`, in the set's order."""
    return [edit for edit in EDITS if edit[0] in line]


def apply(line: str, edit: Edit) -> str:
    """`line` after `sed s/pattern/replacement/`; unchanged where the pattern does not occur."""
    return line.replace(edit[0], edit[1], 1)
