"""The trainer's side of a model server: health, pause, weight loading, in the one order that is safe.

Works against our embedded server and against vLLM (its development endpoints). Every call has a timeout; a failure is
an UpstreamError that carries the server's own words.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from swe_lightning.errors import UpstreamError


class ModelServer:
    """One inference server by URL. Thread-safe."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def health(self) -> dict[str, Any]:
        return self._call("GET", "/health")

    def wait_healthy(self, timeout_s: float) -> None:
        """Until the server answers; UpstreamError with the last complaint after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.health()
                return
            except UpstreamError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def pause(self) -> None:
        """Returns when nothing runs any more; new requests wait at the server."""
        self._call("POST", "/pause", {"mode": "wait"})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def load_weights(self, directory: Path, version: int) -> None:
        arguments = {"weights_path": str(directory.absolute()), "version": version}
        self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": arguments})

    def reset_prefix_cache(self) -> None:
        reply = self._call("POST", "/reset_prefix_cache")
        if reply.get("success") is False:
            raise UpstreamError(f"{self.url}/reset_prefix_cache refused: keys of the old weights would be served")

    def sync(self, directory: Path, version: int) -> None:
        """pause -> load -> reset prefix cache -> resume. After a failure the server stays paused: sync again."""
        self.pause()
        self.load_weights(directory, version)
        self.reset_prefix_cache()
        self.resume()

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UpstreamError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if reply.status_code >= 400:
            raise UpstreamError(f"{self.url}{path} answered {reply.status_code}: {_words(reply)}")
        try:
            data = reply.json() if reply.content else {}
        except ValueError:
            data = {}
        return data if isinstance(data, dict) else {}


def _words(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]
