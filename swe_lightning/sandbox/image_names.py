"""Image references of tasks. Pure: no daemon, no network.

Published rows name the same image in three spellings (`swesmith.x86_64.OWNER__REPO.COMMIT` without a namespace,
`jyangballin/swesmith.x86_64...`, and `swebench/swesmith.x86_64...` with `_1776_` for `__`, which Docker Hub forbids),
SWE-bench rows name none at all, and the architecture in the name is that of the machine it was published from.
`candidates` lists what may be on a registry, the row's own spelling first.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

from swe_lightning.errors import DataError
from swe_lightning.records import Task

NAMESPACES = ("swebench", "jyangballin")
ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}
DIGEST_COLUMN = "image_digest"
"""Column of a task file that pins the image: `sha256:...` of its manifest."""

_SMITH = re.compile(r"swesmith\.(?P<arch>x86_64|arm64|aarch64)\.(?P<rest>.+)")
_BENCH = re.compile(r"sweb\.eval\.(?P<arch>x86_64|arm64|aarch64)\.(?P<rest>.+)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def chosen_image(of_task: str, of_recipe: str | None) -> str:
    """The task's own image, else the recipe's for all. DataError when neither names one."""
    name = of_task or of_recipe
    if not name:
        raise DataError(
            "this task names no image: put an image with Python and the tests' packages into its column image_name, "
            "or, in a recipe, into sandbox.image for every task that names none"
        )
    return name


@dataclass(frozen=True)
class Reference:
    """`[registry/]path[:tag][@digest]`, taken apart."""

    registry: str
    path: str
    tag: str
    digest: str = ""

    @property
    def name(self) -> str:
        """What a daemon knows it by: with the digest where there is one."""
        place = f"{self.registry}/{self.path}" if self.registry else self.path
        return f"{place}@{self.digest}" if self.digest else f"{place}:{self.tag}"


def parse(text: str) -> Reference:
    """DataError for what is no image reference."""
    body, _, digest = text.strip().partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise DataError(f"{text!r}: a digest is sha256: and 64 hexadecimal digits")
    first, slash, rest = body.partition("/")
    registry = first if slash and (set(first) & set(".:") or first == "localhost") else ""
    if registry and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d+)?", registry):
        raise DataError(f"{text!r}: {registry!r} is not a registry (host or host:port)")
    path, colon, tag = (rest if registry else body).partition(":")
    if not re.fullmatch(r"[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*)*", path):
        raise DataError(f"{text!r} is not an image name (lower-case letters, digits, and . _ - between them)")
    if colon and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag):
        raise DataError(f"{text!r}: {tag!r} is not an image tag")
    return Reference(registry, path, tag or "latest", digest)


def task_image(task: Task) -> str:
    """The image a task names, with its pinned digest; "" for tasks that name none."""
    extra = task.model_extra or {}
    name = str(task.image_name or extra.get("image") or extra.get("docker_image") or "")
    if not name:
        if task.repo_path or not task.test_patch or not task.base_commit:
            return ""
        name = f"sweb.eval.x86_64.{task.instance_id.lower()}:latest"
    pinned = str(extra.get(DIGEST_COLUMN) or "")
    return f"{name.partition('@')[0].lower()}@{pinned}" if pinned else name.lower()


def candidates(name: str, machine: str = "") -> list[str]:
    """Spellings under which the image may be published, the given one first, those of this machine's architecture
    before others. A pinned digest stays: it names one image whatever the spelling.
    """
    given = parse(name)
    last = given.path.rsplit("/", 1)[-1]
    match = _SMITH.fullmatch(last) or _BENCH.fullmatch(last)
    if match is None:
        return [given.name]
    kind = "swesmith" if _SMITH.fullmatch(last) else "sweb.eval"
    here = ARCHITECTURES.get((machine or platform.machine()).lower(), "x86_64")
    architectures = [here] + [a for a in ("x86_64", "arm64") if a != here]
    plain = match["rest"].replace("_1776_", "__")
    namespace = given.path.rpartition("/")[0]
    namespaces = dict.fromkeys([namespace, *NAMESPACES] if namespace else NAMESPACES)
    found = [given.name] if namespace and match["arch"] == here else []
    for architecture in architectures:
        for place in namespaces:
            for rest in (plain.replace("__", "_1776_"), plain):
                path = f"{place}/{kind}.{architecture}.{rest}"
                found.append(Reference(given.registry, path, given.tag, given.digest).name)
    return list(dict.fromkeys([*found, given.name]))


def local_names(name: str) -> list[str]:
    """Under which names an image may lie on this machine already: the given one, then every candidate."""
    return list(dict.fromkeys([parse(name).name, *candidates(name)]))
