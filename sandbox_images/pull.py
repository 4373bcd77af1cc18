"""Pull images before a run: every spelling, every mirror, politely. Never inside the measured path.

For each image the registries are asked first (registry.py). The first that has it is pulled from, by digest, and tagged
with the name the task uses. A registry that says 429 is left alone for as long as it says, while mirrors are tried; an
image that nobody has, or that stayed limited past our patience, is `image_unavailable`: a machine's fault, never a 0.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx

from sandbox_images.registry import HUB, Answer, ask
from swe_lightning.errors import SandboxStartError
from swe_lightning.records import InfraReason
from swe_lightning.sandbox import image_usage as usage
from swe_lightning.sandbox.docker_engine import find_image, short
from swe_lightning.sandbox.image_names import Reference, candidates, parse

if TYPE_CHECKING:
    import docker

PATIENCE_S = 900.0
FAILED_WAIT_S = 5.0
LIMIT_WORDS = ("toomanyrequests", "429", "rate limit")


@dataclass(frozen=True)
class Pulled:
    """`state`: present (it was here), pulled, or the reason image_unavailable with `detail`."""

    image: str
    state: str
    source: str = ""
    digest: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.state in ("present", "pulled")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Puller:
    """Thread-safe. `per_hour` bounds pulls that are started; `patience_s` what one image may wait in all."""

    def __init__(
        self,
        client: docker.APIClient,
        *,
        mirrors: Sequence[str] = (),
        per_hour: float | None = None,
        patience_s: float = PATIENCE_S,
        say: Callable[[str, str], None] = lambda image, what: None,
    ) -> None:
        self._client = client
        self._http = httpx.Client(timeout=30, follow_redirects=True)
        self._mirrors = mirrors
        self._interval_s = 3600 / per_hour if per_hour else 0.0
        self._patience_s = patience_s
        self._say = say
        self._lock = threading.Lock()
        self._next_start = 0.0
        self._closed_until: dict[str, float] = {}

    def pull(self, images: Sequence[str], jobs: int = 2) -> list[Pulled]:
        """In the order given, each name once."""
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(self._one, dict.fromkeys(images)))

    def _one(self, image: str) -> Pulled:
        began = time.monotonic()
        wanted = parse(image)
        with contextlib.suppress(SandboxStartError):
            info = find_image(self._client, image)
            usage.used(info["Id"])
            return Pulled(image, "present", digest=digest_of(info))
        until = began + self._patience_s
        names = [parse(name) for name in candidates(image)]
        while True:
            answer, reference = self._search(names)
            if reference is not None:
                self._wait_for_turn()
                failure = self._fetch(image, wanted, reference, answer.digest)
                if failure is None:
                    info = find_image(self._client, image)
                    usage.used(info["Id"], pulled_as=image)
                    seconds = time.monotonic() - began
                    return Pulled(image, "pulled", reference.name, answer.digest or digest_of(info), seconds=seconds)
                answer = failure
            if answer.state == "missing" or time.monotonic() + answer.wait_s > until:
                break
            self._say(image, f"waits {answer.wait_s:.0f} s ({answer.detail})")
            time.sleep(max(answer.wait_s, 0.05))
        reason = InfraReason.IMAGE_UNAVAILABLE.value
        return Pulled(image, reason, detail=answer.detail, seconds=time.monotonic() - began)

    def _search(self, names: list[Reference]) -> tuple[Answer, Reference | None]:
        """The first place that has it; else the most hopeful of the refusals."""
        worst = Answer("missing", detail=f"no registry has {names[0].name} under any of {len(names)} names")
        places = [names[0].registry, *self._mirrors]
        for name in names:
            for place in places:
                host = place or HUB
                closed_s = self._closed_until.get(host, 0.0) - time.monotonic()
                if closed_s > 0:
                    answer = Answer("limited", wait_s=closed_s, detail=f"{host}: 429")
                else:
                    answer = ask(self._http, replace(name, registry=place))
                if answer.state == "found":
                    return answer, replace(name, registry=place)
                if answer.state == "limited":
                    self._closed_until[host] = time.monotonic() + answer.wait_s
                    if worst.state != "limited" or answer.wait_s < worst.wait_s:
                        worst = answer
                elif answer.state == "failed" and worst.state == "missing":
                    worst = replace(answer, wait_s=FAILED_WAIT_S)
        return worst, None

    def _wait_for_turn(self) -> None:
        with self._lock:
            turn = max(self._next_start, time.monotonic())
            self._next_start = turn + self._interval_s
        time.sleep(max(0.0, turn - time.monotonic()))

    def _fetch(self, image: str, wanted: Reference, place: Reference, digest: str) -> Answer | None:
        """Pull by digest and give it the name tasks use. None when it worked."""
        import docker.errors

        repository = f"{place.registry}/{place.path}" if place.registry else place.path
        try:
            for line in self._client.pull(repository, tag=digest or place.tag, stream=True, decode=True):
                if "error" in line:
                    raise docker.errors.APIError(line["error"], explanation=line["error"])
                if line.get("progress"):
                    self._say(image, f"{line.get('status', '')} {line['progress']}")
            there = f"{repository}@{digest}" if digest else place.name
            local = f"{wanted.registry}/{wanted.path}" if wanted.registry else wanted.path
            self._client.tag(there, local, tag=wanted.tag)
            return None
        except docker.errors.APIError as error:
            said = short(error)
            limited = any(word in said.lower() for word in LIMIT_WORDS)
            return Answer("limited" if limited else "failed", wait_s=60.0 if limited else FAILED_WAIT_S, detail=said)


def digest_of(info: dict[str, Any]) -> str:
    """The manifest's digest as the registry named it; "" for images that came from no registry."""
    return next((d.rpartition("@")[2] for d in info.get("RepoDigests") or []), "")
