"""Pulls against a real registry on the loopback, through a proxy that is as rude as a busy hub."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import cli
from sandbox_images import inventory
from sandbox_images.pull import Puller
from sandbox_images.push import push_image
from sandbox_images.registry import retry_after
from swe_lightning.sandbox import image_usage
from swe_lightning.sandbox.docker_engine import find_image
from swe_lightning.sandbox.hardening import Hardener

TINY = "swebench/swesmith.x86_64.owner_1776_tiny.0123"


@pytest.fixture(scope="module")
def published(client: Any, registry: str) -> str:
    """A one-file image on the registry only; its manifest's digest."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        entry = tarfile.TarInfo("Dockerfile")
        text = b"FROM scratch\nCOPY Dockerfile /\n"
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    context.seek(0)
    name = f"{registry}/{TINY}"
    list(client.build(fileobj=context, custom_context=True, tag=name, rm=True))
    lines = list(client.push(name, stream=True, decode=True))
    remove(client, name)
    digest: str = next(line["aux"]["Digest"] for line in lines if "aux" in line)
    return digest


def remove(client: Any, *names: str) -> None:
    import docker.errors

    for name in names:
        for known in client.images(name):
            for reference in [*(known["RepoTags"] or []), *(known["RepoDigests"] or [])]:
                try:
                    client.remove_image(reference, force=True)
                except docker.errors.NotFound:
                    pass


@contextmanager
def busy(behind: str, refusals: int, wait: str) -> Iterator[tuple[str, list[float]]]:
    """A registry that says 429 `refusals` times, then answers as the one behind it: (host:port, times of requests)."""
    seen: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            seen.append(time.monotonic())
            if len(seen) <= refusals:
                self.send_response(429)
                self.send_header("Retry-After", wait)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() in ("accept", "range")}
            reply = httpx.request(self.command, f"http://{behind}{self.path}", headers=headers)
            self.send_response(reply.status_code)
            for name, value in reply.headers.items():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(reply.content)

        do_GET = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_any_spelling_is_pulled_by_digest_and_named_as_the_task_does(
    client: Any, registry: str, published: str
) -> None:
    wanted = f"{registry}/swesmith.x86_64.owner__tiny.0123"
    (done,) = Puller(client).pull([wanted])
    assert (done.state, done.digest, done.source) == ("pulled", published, f"{registry}/{TINY}:latest")
    info = find_image(client, wanted)
    assert find_image(client, f"{wanted}@{published}")["Id"] == info["Id"]
    assert [p.state for p in Puller(client).pull([wanted, wanted])] == ["present"]
    assert image_usage.pulled(info["Id"]) == [wanted]
    remove(client, wanted, f"{registry}/{TINY}")


def test_retry_after_is_honoured(client: Any, registry: str, published: str) -> None:
    """S11: two refusals of one second each, then the image."""
    with busy(registry, 2, "1") as (host, seen):
        waited: list[str] = []
        puller = Puller(client, patience_s=30, say=lambda image, what: waited.append(what))
        (done,) = puller.pull([f"{host}/{TINY}"])
        assert (done.state, done.digest) == ("pulled", published)
        assert seen[1] - seen[0] >= 1
        assert seen[2] - seen[1] >= 1
        assert any("waits 1 s" in line for line in waited)
        remove(client, f"{host}/{TINY}")


def test_a_registry_that_stays_busy_is_an_infrastructure_reason(client: Any, registry: str, published: str) -> None:
    with busy(registry, 1000, "60") as (host, seen):
        started = time.monotonic()
        (done,) = Puller(client, patience_s=1).pull([f"{host}/{TINY}"])
        assert time.monotonic() - started < 10
        assert (done.state, done.ok, done.detail) == ("image_unavailable", False, f"{host}: 429")
        assert len(seen) == 1, "a registry that asked for a minute is not asked about the next spelling"
        (done,) = Puller(client, patience_s=1, mirrors=[registry]).pull([f"{host}/{TINY}"])
        assert (done.state, done.source) == ("pulled", f"{registry}/{TINY}:latest")
        assert find_image(client, f"{host}/{TINY}")
        remove(client, f"{host}/{TINY}", f"{registry}/{TINY}")


def test_a_missing_manifest_is_image_unavailable_at_once(client: Any, registry: str) -> None:
    started = time.monotonic()
    (done,) = Puller(client).pull([f"{registry}/nobody/has-this:1"])
    assert time.monotonic() - started < 10
    assert (done.state, done.ok) == ("image_unavailable", False)
    assert "no registry has" in done.detail


def test_retry_after_in_every_form() -> None:
    assert retry_after("7") == 7
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("") == retry_after("soon") == 60


def test_commands(client: Any, registry: str, published: str, task_image_name: str, tmp_path: Path) -> None:
    """pull --pin, list, check, build --push, prune; all with --json, all through the command line."""
    runner = CliRunner()

    def swel(*arguments: str, code: int = 0) -> Any:
        result = runner.invoke(cli.app, ["images", *arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    tasks = tmp_path / "tasks.jsonl"
    rows = [{"instance_id": "x__1", "repo": "x", "image_name": f"{registry}/{TINY}"}]
    rows.append({"instance_id": "pkg__1", "repo": "pkg", "image_name": task_image_name, "FAIL_TO_PASS": ["t"]})
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pulled = swel("pull", str(tasks), "--pin", str(tmp_path / "pinned.jsonl"))
    assert [p["state"] for p in pulled] == ["pulled", "present"]
    pinned = [json.loads(line) for line in (tmp_path / "pinned.jsonl").read_text().splitlines()]
    assert pinned == [{**rows[0], "image_digest": published}, rows[1]]
    assert [row["here"] for row in swel("list", str(tmp_path / "pinned.jsonl"))] == [True, True]
    assert swel("pull", f"{registry}/nobody/has-this:1", code=1)[0]["state"] == "image_unavailable"

    (built,) = swel("build", task_image_name)
    assert client.images(built["hardened"])
    client.tag(f"{registry}/{TINY}", "swel-test-tiny", tag="1")
    tiny = "swel-test-tiny:1"  # not a hardened one: compressing it takes long
    sent = push_image(client, tiny, registry, tiny)
    assert sent == {"pushed": f"{registry}/swel-test-tiny:1", "digest": published}

    only = tmp_path / "one.jsonl"
    only.write_text(json.dumps(rows[1]) + "\n")
    checks = {row["check"]: row["ok"] for row in swel("check", str(only))}
    assert set(checks.values()) == {True}
    wanted = {"a shell prints nothing by itself", "python is found", "pkg imports", "pkg is the tree's own"}
    assert wanted | {"the tests start"} < set(checks)
    (bad, *_) = swel("check", f"{registry}/{TINY}", code=1)
    assert (bad["check"], bad["ok"]) == ("starts", False)

    known = [name for unit in swel("list") for name in unit["names"]]
    assert {f"{registry}/{TINY}", task_image_name} <= set(known)
    remove(client, f"{registry}/{TINY}", "swel-test-tiny", f"{registry}/swel-test-tiny")


def test_one_image_of_two_registries_is_listed_once_with_both_names(client: Any, registry: str, published: str) -> None:
    """Whichever name comes first in the alphabet: a user looks for the one in the task file."""
    name = f"{registry}/{TINY}"
    Puller(client).pull([name])
    client.tag(name, "0.other-hub.test/tiny", tag="2")
    image_id = find_image(client, name)["Id"]
    image_usage.used(image_id, pulled_as="0.gone.test/tiny:1")
    (unit,) = (unit for unit in inventory.units(client) if unit.image_id == image_id)
    assert {f"{name}", "0.other-hub.test/tiny:2", "0.gone.test/tiny:1"} <= set(unit.names)
    inventory.remove(client, unit)
    remove(client, "0.other-hub.test/tiny")


def test_pruning_takes_what_was_needed_least_recently(
    client: Any, registry: str, published: str, task_image_name: str
) -> None:
    name = f"{registry}/{TINY}"
    Puller(client).pull([name])
    image_id = find_image(client, name)["Id"]
    known = inventory.units(client)
    assert known[-1].image_id == image_id
    assert inventory.prune(client, sum(unit.bytes for unit in known)) == []
    idle = [unit for unit in known if not unit.running]
    planned = inventory.prune(client, sum(unit.bytes for unit in known) - 1, dry_run=True)
    assert [unit.image_id for unit in planned] == [idle[0].image_id]
    assert [unit.image_id for unit in inventory.prune(client, 0, dry_run=True)] == [unit.image_id for unit in idle]
    # Removing by budget would take hardened images that are not this test's; so one unit each of both kinds.
    inventory.remove(client, known[-1])
    assert client.images(name) == []
    Hardener(client).image(task_image_name)
    ours = find_image(client, task_image_name)["Id"]
    (unit,) = (unit for unit in inventory.units(client) if unit.image_id == ours)
    inventory.remove(client, unit)
    assert unit.hardened
    assert [client.images(tag) for tag in unit.hardened] == [[]] * len(unit.hardened)
    assert find_image(client, task_image_name), "an image that we did not pull is not ours to remove"
