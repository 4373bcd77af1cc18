"""A small package written on the spot, and rows as `swel data synth` and SWE-smith publish them."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CALC = '''\
"""Arithmetic with limits."""


def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value


def total(values, *, positive=False):
    result = 0
    for value in values:
        if positive and value < 0:
            continue
        result += value
    return result


def is_even(value):
    return value % 2 == 0


def never_called(value):
    return value + 1
'''

TESTS = """\
import pytest

from calc import clamp, is_even, total


def test_clamp_low():
    assert clamp(1, 3, 9) == 3


def test_clamp_high():
    assert clamp(11, 3, 9) == 9


def test_clamp_keeps():
    assert clamp(5, 3, 9) == 5


class TestTotal:
    def test_plain(self):
        assert total([1, 2, -3]) == 0

    def test_positive(self):
        assert total([1, 2, -3], positive=True) == 3


@pytest.mark.parametrize("value", [0, 2])
def test_even(value):
    assert is_even(value)


def test_fails_always():
    assert clamp(1, 1, 1) == 2
"""


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    def make(number: int = 0, **changes: Any) -> dict[str, Any]:
        row = {
            "instance_id": f"owner__name.0123abcd.func_basic__{number:08d}",
            "repo": f"swesmith/owner__name{number % 3}.0123abcd",
            "problem_statement": "It does not work.",
            "patch": "",
            "FAIL_TO_PASS": ["t.py::test_a"],
            "PASS_TO_PASS": ["t.py::test_b"],
        }
        return {**row, **changes}

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[dict[str, Any]], name: str = "tasks.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


@pytest.fixture
def small_repository(tmp_path: Path) -> Path:
    """A committed git repository with one module and its tests; one test fails on the clean tree."""
    directory = tmp_path / "calc-project"
    (directory / "tests").mkdir(parents=True)
    (directory / "calc.py").write_text(CALC)
    (directory / "tests" / "test_calc.py").write_text(TESTS)
    commands = [
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "start"],
    ]
    for command in commands:
        subprocess.run(["git", *command], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, so that nothing remembered by an earlier session can stand in for a real run."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEL_HOME", str(home))
        yield home


class WrittenRollouts:
    """Rollouts whose outcomes are written down beforehand: outcome n of a task is what its rollout n will say.

    Each `finished` gives the one that is open longest. `stop_after`: Ctrl-C after so many.
    """

    def __init__(
        self, outcomes: Mapping[str, Sequence[bool | None]], *, window: int = 8, stop_after: int | None = None
    ) -> None:
        self.outcomes, self.window, self.stop_after = outcomes, window, stop_after
        self.asked: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.most_open = 0

    def __enter__(self) -> WrittenRollouts:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, wanted: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        self.asked += [(row["instance_id"], number) for row, number in wanted]
        self.most_open = max(self.most_open, len(self.asked) - len(self.ended))

    def finished(self) -> list[tuple[str, int, bool | None]]:
        if self.stop_after is not None and len(self.ended) >= self.stop_after:
            raise KeyboardInterrupt
        name, number = self.asked[len(self.ended)]
        self.ended.append((name, number))
        written = self.outcomes.get(name, ())
        return [(name, number, written[number] if number < len(written) else None)]

    def count(self, name: str) -> int:
        return sum(asked == name for asked, _ in self.asked)


@pytest.fixture
def written_rollouts() -> type[WrittenRollouts]:
    return WrittenRollouts


Answer = str | tuple[int, Any]


class Server:
    """A model server of chat completions. It answers in turn what `answers` holds, the last one again and again.

    An answer is a text, or (status, body).
    """

    def __init__(self, answers: list[Answer]) -> None:
        self.answers, self.asked, self.keys = answers, list[dict[str, Any]](), list[str | None]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body)
                outer.keys.append(self.headers["authorization"])
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                status, content = (200, outer.completion(answer)) if isinstance(answer, str) else answer
                if self.path != "/v1/chat/completions":
                    status, content = 404, {"error": "no such route"}
                data = json.dumps(content).encode() if not isinstance(content, bytes) else content
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    @staticmethod
    def completion(text: str, finish: str = "stop") -> dict[str, Any]:
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Answer) -> Server:
        servers.append(Server(list(answers)))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()
