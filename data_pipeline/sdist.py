"""Source distributions by name and version, fetched without running a line of them.

pip's own download builds metadata, which executes `setup.py`; so this asks the index that pip is configured with (the
simple API of PEP 503/691), downloads the one archive over HTTP, checks its SHA-256 and keeps it under
`home()/sdists`. A file already there is used without a network. Refuses wheels, zip archives and unknown digests.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from data_pipeline.trees import Tree, read_tar
from swe_lightning.errors import DataError, MissingPart
from swe_lightning.paths import home
from swe_lightning.rundir import write_atomic

TIMEOUT_S = 30.0
TRIES = 3


@dataclass(frozen=True)
class Sdist:
    """One archive: `file` lies in the cache and has this digest."""

    package: str
    version: str
    sha256: str
    file: Path

    def tree(self) -> Tree:
        return read_tar(self.file.read_bytes(), self.file.name, strip_top=True)


def normalise(name: str) -> str:
    """PEP 503: runs of `-_.` are one dash, lower case."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirement(text: str) -> tuple[str, str]:
    """`NAME==VERSION`. Versions are never chosen for the user: tasks must be reproducible."""
    match = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([A-Za-z0-9.!+_-]+)\s*", text)
    if not match:
        raise DataError(f"{text!r}: write NAME==VERSION, for example termcolor==3.3.0")
    return match[1], match[2]


def fetch(package: str, version: str, *, sha256: str | None = None) -> Sdist:
    """The archive from the cache or the index. DataError when it does not exist or its digest differs."""
    directory = home() / "sdists"
    directory.mkdir(exist_ok=True)
    wanted = _archive_names(package, version)
    known = _published_names(directory, package, version)
    for name in (*known, *wanted):
        file = directory / name
        if file.is_file():
            digest = _digest(file)
            if digest == (sha256 or known.get(name, digest)):
                return Sdist(package, version, digest, file)
    name, url, published = _locate(package, version, wanted)
    data = _get(url)
    digest = hashlib.sha256(data).hexdigest()
    if published and digest != published:
        raise DataError(f"{name}: the download has digest {digest}, the index says {published}; try again")
    if sha256 and digest != sha256:
        raise DataError(f"{name} has digest {digest}, expected {sha256}: the published archive is not the one meant")
    file = directory / name
    write_atomic(file, data)
    write_atomic(_note(directory, package, version), f"{name} {digest}")
    return Sdist(package, version, digest, file)


def _note(directory: Path, package: str, version: str) -> Path:
    return directory / f"{normalise(package)}-{version}.sha256"


def _published_names(directory: Path, package: str, version: str) -> dict[str, str]:
    """File name -> digest as the index published it when the archive was fetched; authors spell names freely."""
    note = _note(directory, package, version)
    if not note.is_file():
        return {}
    name, _, digest = note.read_text().partition(" ")
    return {name: digest}


def _archive_names(package: str, version: str) -> list[str]:
    spellings = dict.fromkeys([package, normalise(package).replace("-", "_"), normalise(package), package.lower()])
    return [f"{spelling}-{version}.tar.gz" for spelling in spellings]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _locate(package: str, version: str, wanted: list[str]) -> tuple[str, str, str | None]:
    """(file name, URL, published SHA-256) on the first configured index that has the archive."""
    tail = f"-{version}.tar.gz"
    faults = []
    for index in index_urls():
        page = f"{index.rstrip('/')}/{normalise(package)}/"
        try:
            files = _listing(page)
        except DataError as error:
            faults.append(str(error))
            continue
        for name, url, digest in files:
            if name in wanted or (name.endswith(tail) and normalise(name[: -len(tail)]) == normalise(package)):
                return name, url, digest
    if faults:
        raise DataError(
            f"cannot fetch {package}=={version}: {faults[0]}; "
            f"connect to a network or put {wanted[0]} into {home() / 'sdists'}"
        )
    raise DataError(f"{package}=={version} has no source distribution (.tar.gz) on the configured index")


@lru_cache(maxsize=1)
def index_urls() -> tuple[str, ...]:
    """The indexes pip would ask here: its environment, its configuration files, else its built-in default."""
    config = dict(re.findall(r"^(\S+?)='(.*)'$", _pip("config", "list"), re.M))
    main = os.environ.get("PIP_INDEX_URL") or config.get("global.index-url") or config.get("user.index-url")
    if not main:
        default = re.search(r"--index-url.*?\(default\s+(\S+?)\)", _pip("download", "--help"), re.S)
        if not default:
            raise MissingPart("pip does not say which package index it uses; set PIP_INDEX_URL")
        main = default[1]
    configured = config.get("global.extra-index-url", "") + " " + config.get("user.extra-index-url", "")
    extra = (os.environ.get("PIP_EXTRA_INDEX_URL") or configured.replace("\\n", " ")).split()
    return tuple(dict.fromkeys([main, *extra]))


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    environment = {**os.environ, "COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout


def _listing(page: str) -> list[tuple[str, str, str | None]]:
    """Files on a simple-API page, in JSON or HTML form, as (name, absolute URL, SHA-256)."""
    if page.startswith("file:"):
        index = Path(unquote(urlsplit(page).path)) / "index.html"
        if not index.is_file():
            return []
        return _parse_html(index.read_text(encoding="utf-8", errors="replace"), page)
    reply = _request(page, accept="application/vnd.pypi.simple.v1+json, text/html;q=0.5")
    if reply is None:
        return []
    if "json" in reply.headers.get("content-type", ""):
        files = reply.json().get("files", [])
        return [(f["filename"], urljoin(page, f["url"]), f.get("hashes", {}).get("sha256")) for f in files]
    return _parse_html(reply.text, page)


def _parse_html(text: str, page: str) -> list[tuple[str, str, str | None]]:
    found = []
    for raw in re.findall(r"""<a\b[^>]*?href\s*=\s*["']([^"']+)["']""", text, re.I):
        url, _, fragment = urljoin(page, html.unescape(raw)).partition("#")
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        found.append((unquote(url.rsplit("/", 1)[-1]), url, digest))
    return found


def _get(url: str) -> bytes:
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path)).read_bytes()
    reply = _request(url)
    if reply is None:
        raise DataError(f"{url.rsplit('/', 1)[-1]} is listed by the index but not there")
    return reply.content


def _request(url: str, accept: str = "*/*") -> Any:
    """A finished httpx response, None for 404; connection faults and 5xx are tried again."""
    import httpx

    fault = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(0.5 * attempt)
        try:
            reply = httpx.get(
                url, headers={"accept": accept}, follow_redirects=True, timeout=TIMEOUT_S, verify=_tls_context()
            )
        except httpx.HTTPError as error:
            fault = str(error) or type(error).__name__
            continue
        if reply.status_code == 404:
            return None
        if reply.status_code < 400:
            return reply
        fault = f"status {reply.status_code}"
        if reply.status_code < 500 and reply.status_code != 429:
            break
    raise DataError(f"the package index did not answer: {fault}")


@lru_cache(maxsize=1)
def _tls_context() -> Any:
    import ssl

    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or None
    return ssl.create_default_context(cafile=certificates)
