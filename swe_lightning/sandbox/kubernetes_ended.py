"""What nobody will remove any more: the jobs and pods of owners that are gone, and ended ones the cluster forgot.

Several machines may share a namespace, and several runs a machine: an owner elsewhere is never judged from here.
"""

from __future__ import annotations

import functools
import socket
import time
from datetime import UTC, datetime

from swe_lightning.sandbox.kubernetes_api import OURS, Cluster, retrying
from swe_lightning.sandbox.kubernetes_manifests import ENDED_TTL_S, OWNER, RAW_LABEL
from swe_lightning.sandbox.owners import owner_is_gone


def remove_ended(cluster: Cluster, label: str | None) -> int:
    """How many objects were removed; only of boxes with that label, if one is given."""
    until = time.monotonic() + 60
    removed = 0
    for kind in ("jobs", "pods"):
        found = retrying(cluster, "cannot list sandboxes", functools.partial(cluster.find, kind, OURS), until)
        for one in found:
            notes = one["metadata"].get("annotations") or {}
            if one["metadata"].get("ownerReferences") or (label is not None and notes.get(RAW_LABEL) != label):
                continue
            if its_owner_is_gone(notes.get(OWNER, "")) or ended_long_ago(one):
                delete = functools.partial(cluster.delete, kind, one["metadata"]["name"])
                removed += retrying(cluster, "cannot remove a sandbox", delete, until)
    return removed


def its_owner_is_gone(stamp: str) -> bool:
    """Whether it certainly ended; owners on other machines are not judged from here."""
    host, _, rest = stamp.partition(" ")
    return host == socket.gethostname() and owner_is_gone(rest)


def ended_long_ago(found: dict[str, object]) -> bool:
    status = found.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    for condition in conditions or []:
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            ended = datetime.fromisoformat(condition["lastTransitionTime"])
            return (datetime.now(UTC) - ended).total_seconds() > ENDED_TTL_S
    return False
