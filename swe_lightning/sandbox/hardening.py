"""From an image somebody published to one an agent may be put into: hardened once, then used for every box.

The hardened image adds one layer: the command server with its own Python (bundle.py), the box's user, and the absence
of git, histories, caches and credentials (boxside/harden.py). The environment of the image's interactive shell (the
conda environment that ~/.bashrc activates) is read once and kept in a label (and, for clusters, in a file), so commands
need no start-up files and those files cannot print into anybody's output. Building needs no network and uses none.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning import paths
from swe_lightning.errors import SandboxStartError
from swe_lightning.locks import once
from swe_lightning.sandbox import image_usage
from swe_lightning.sandbox.base import ORIGINAL_ROOT, TREE_ROOT
from swe_lightning.sandbox.bundle import IN_BOX, bundle, launch
from swe_lightning.sandbox.docker_engine import OWNER, find_image, short
from swe_lightning.sandbox.image_names import parse
from swe_lightning.sandbox.owners import owner_stamp

if TYPE_CHECKING:
    import docker

BOX_UID = 60_600
"""The user of boxes: in no range that distributions or systemd hand out, so that it is nobody on the host."""
RECIPE = "2"
"""Raise when hardening changes: images hardened before are made anew."""
PREFIX = "swel-hardened"
LABELS = {"source": "swel.source", "id": "swel.source_id", "env": "swel.env", "key": "swel.key"}
PROBE_TIMEOUT_S = 120
NO_NEW_PRIVILEGES = "no-new-privileges:true"
MARK = b"\0swel-env\0"
NOT_INHERITED = re.compile(
    r"HOME|PWD|OLDPWD|SHLVL|_|HOSTNAME|TERM|PS\d|LS_COLORS|USER|LOGNAME|MAIL|SHELL|LESS.*|BASH_.*|ENV|PROMPT_COMMAND|"
    r"DEBIAN_FRONTEND|.*(TOKEN|SECRET|PASSWORD|API_KEY).*"
)
ENVIRONMENT = "environment.json"
"""Below IN_BOX: the same as the label, for whoever cannot ask a daemon."""
HARDEN = "from boxside.harden import main; main()"
DOCKERFILE = """\
FROM {source}
USER root
COPY swel {root}
RUN {harden}
LABEL {labels}
ENTRYPOINT []
WORKDIR {tree}
"""


@dataclass(frozen=True)
class HardenedImage:
    name: str
    """Its tag on this machine."""
    source: str
    env: dict[str, str]
    """What the image's own interactive shell would have set."""


class Hardener:
    """Thread-safe; remembers what it has seen. Several processes build an image once."""

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client
        self._known: dict[str, HardenedImage] = {}
        self._lock = threading.Lock()

    def image(self, source: str) -> HardenedImage:
        """SandboxStartError(image_unavailable) when `source` is not on this machine."""
        with self._lock:
            known = self._known.get(source)
        if known is None:
            known = self._make(source)
            with self._lock:
                self._known[source] = known
        return known

    def forget(self, source: str) -> None:
        """Somebody removed its image meanwhile."""
        with self._lock:
            self._known.pop(source, None)

    def _make(self, source: str) -> HardenedImage:
        info = find_image(self._client, source)
        image_usage.used(info["Id"])
        runtime = bundle()
        key = f"{runtime.name}-{RECIPE}"
        labels = info["Config"].get("Labels") or {}
        if labels.get(LABELS["key"]) == key:
            return HardenedImage(source, labels[LABELS["source"]], json.loads(labels[LABELS["env"]]))
        name = hardened_name(source, info["Id"], key)
        with once(paths.home() / "bundles", runtime.name):
            made = self.inspect(name)
            if made is None:
                self._build(source, info, name, key, runtime)
                made = self.inspect(name)
        if made is None:
            raise SandboxStartError(f"image {source} could not be hardened: it vanished after its build")
        return HardenedImage(name, source, json.loads(made["Config"]["Labels"][LABELS["env"]]))

    def inspect(self, name: str) -> dict[str, Any] | None:
        import docker.errors

        try:
            info: dict[str, Any] = self._client.inspect_image(name)
            return info
        except docker.errors.NotFound:
            return None

    def _build(self, source: str, info: dict[str, Any], name: str, key: str, runtime: Path) -> None:
        import docker.errors

        env = shell_environment(self._client, info["Id"])
        settings = {"tree": TREE_ROOT, "original": ORIGINAL_ROOT, "uid": BOX_UID, "path": env.get("PATH", "")}
        labels = {
            LABELS["source"]: source,
            LABELS["id"]: info["Id"],
            LABELS["env"]: json.dumps(env),
            LABELS["key"]: key,
        }
        dockerfile = DOCKERFILE.format(
            source=info["Id"],
            root=IN_BOX,
            harden=json.dumps(launch("-c", HARDEN, json.dumps(settings))),
            labels=" ".join(f"{k}={json.dumps(v).replace('$', chr(92) + '$')}" for k, v in labels.items()),
            tree=TREE_ROOT,
        )
        said: list[str] = []
        try:
            for line in self._client.build(
                fileobj=_context(dockerfile, runtime, env), custom_context=True, tag=name, rm=True, forcerm=True,
                network_mode="none", decode=True, pull=False,
            ):  # fmt: skip
                said.append(line.get("stream") or line.get("error") or "")
                if "error" in line:
                    raise SandboxStartError(
                        f"image {source} could not be hardened: {' '.join(''.join(said[-6:]).split())}"
                    )
        except docker.errors.DockerException as error:
            raise SandboxStartError(f"image {source} could not be hardened: {short(error)}") from error


def hardened_name(source: str, image_id: str, key: str) -> str:
    """A local tag that says where it came from and changes when any ingredient does."""
    last = re.sub(r"[^a-z0-9._-]+", "-", source.split("@")[0].rsplit("/", 1)[-1].lower()).strip("-._")
    return f"{PREFIX}/{last or 'image'}:{image_id.removeprefix('sha256:')[:16]}-{key[:12]}-{RECIPE}"


def cluster_name(source: str) -> str:
    """What `swel images build --push` calls the hardened image: known without a daemon, so that a cluster's client and
    whoever pushed agree. A name that is one of a hardened image already stays.
    """
    if f"{PREFIX}/" in source:
        return source
    reference = parse(source)
    identity = hashlib.sha256(f"{reference.path}:{reference.tag}@{reference.digest}".encode()).hexdigest()
    return hardened_name(source, identity, f"{bundle().name}-{RECIPE}")


def shell_environment(client: docker.APIClient, image: str) -> dict[str, str]:
    """Variables after the start-up files of an interactive bash, as the image's own user; PATH is never replaced."""
    script = r"printf '\0swel-env\0'; exec env -0"
    container = client.create_container(
        image, ["bash", "-ic", script], entrypoint=[], stdin_open=False, labels={OWNER: owner_stamp()},
        host_config=client.create_host_config(network_mode="none", cap_drop=["ALL"], security_opt=[NO_NEW_PRIVILEGES]),
    )["Id"]  # fmt: skip
    try:
        client.start(container)
        client.wait(container, timeout=PROBE_TIMEOUT_S)
        output = client.logs(container, stdout=True, stderr=False)
    except Exception as error:
        raise SandboxStartError(f"bash does not run in image {image}: {short(error)}") from error
    finally:
        client.remove_container(container, force=True)
    _, mark, text = output.partition(MARK)
    if not mark:
        raise SandboxStartError(f"bash does not run in image {image}: {output[-300:].decode(errors='replace')}")
    pairs = (entry.decode(errors="surrogateescape").partition("=") for entry in text.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs if not NOT_INHERITED.fullmatch(name)}


def _context(dockerfile: str, runtime: Path, env: dict[str, str]) -> io.BytesIO:
    """A build context with stable bytes: the Dockerfile, the bundle, the environment; owned by root, without times."""
    buffer = io.BytesIO()

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(runtime, "swel", filter=anonymous)
        for name, text in (("Dockerfile", dockerfile), (f"swel/{ENVIRONMENT}", json.dumps(env))):
            entry = anonymous(tarfile.TarInfo(name))
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    buffer.seek(0)
    return buffer
