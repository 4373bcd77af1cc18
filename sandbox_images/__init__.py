"""Images of task sandboxes: names, pulls, hardening, checks, disk. `swel images ...` is a thin layer over this room.

`branches(image)` is the bulk question "does this image hold that instance's branch", answered once per image.
"""

from __future__ import annotations


def branches(image: str) -> set[str]:
    """Names of all branches of the repository in an image on this machine; see sandbox/image_trees.py."""
    from swe_lightning.sandbox.image_trees import branches as found

    return found(image)
