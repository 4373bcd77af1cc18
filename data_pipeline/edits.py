"""Which one-line edit repairs a bug, out of the closed set that the small demonstration policy may choose from.

A repair is a text edit as `sed 's/pattern/replacement/'` makes it: the first match on the line. A bug belongs to the
demonstration only if some edit of the set turns its line back into the original, exactly.
"""

from __future__ import annotations

from swe_lightning.policy.edits import EDITS, Edit, apply


def repair(mutated: str, original: str) -> Edit | None:
    """The first edit of the set that restores the line, or None."""
    if mutated == original:
        return None
    return next((edit for edit in EDITS if apply(mutated, edit) == original), None)
