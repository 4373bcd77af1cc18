"""What a model call costs on its way through the gateway, beside no proxy, a bare proxy and a plain recording proxy.

    python benchmarks/gateway.py               about four minutes on two quiet cores
    python benchmarks/gateway.py --markdown    the tables as in docs/performance.md
    python benchmarks/gateway.py --only cost --seconds 2

One run, side by side, in alternating rounds: model server, load and each proxy are processes of their own (see
gateway_parts.py), and CPU is read from /proc per process, so that a slow load generator cannot flatter or blame a
proxy. Throughput is given twice: per second of wall (bounded by all processes on the cores there are) and per CPU
second of the proxy alone (what a core of its own would carry). Only the gateway writes to disk: each of its calls is
durable before it is answered. What it does not cover: real engines, and several machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from swe_lightning.controller.supervisor import free_port
from swe_lightning.gateway.client import GatewayClient, Lease
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Rollout

PARTS = Path(__file__).with_name("gateway_parts.py")
SIZES = (3_000, 30_000)
AGENTS = (1, 32)
PATHS = {"direct": "no proxy", "bare": "bare proxy", "plain": "FastAPI + httpx", "gateway": "gateway"}


class Process:
    """A child with the CPU time and memory it has used; ended by its id."""

    def __init__(self, *command: str, quiet: bool = False) -> None:
        environment, stderr = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.DEVNULL if quiet else None
        self.child = subprocess.Popen([sys.executable, *command], env=environment, stderr=stderr)
        self.info = psutil.Process(self.child.pid)

    def cpu_s(self) -> float:
        times = self.info.cpu_times()
        return times.user + times.system

    def rss_mb(self) -> float:
        return self.info.memory_info().rss / 2**20

    def end(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class House:
    """Upstream, the other proxies and a gateway, started once for all cases that share a latency."""

    def __init__(self, stack: ExitStack, folder: Path, *, latency_s: float = 0.0, others: bool = True) -> None:
        self._stack, self.folder = stack, folder
        self.ports = {name: free_port() for name in ("upstream", "bare", "plain")}
        self.upstream_url = f"http://127.0.0.1:{self.ports['upstream']}"
        names = ("upstream", "bare", "plain") if others else ("upstream",)
        self.processes = {name: self._part(name, latency_s) for name in names}
        gateway = ("-m", "swe_lightning.gateway.server", "--run", str(folder), "--port", "0")
        self.processes["gateway"] = self._own(*gateway, quiet=True)  # it keeps a log of its own
        wait_for(lambda: (folder / "gateway.json").exists())
        served = json.loads((folder / "gateway.json").read_text())
        keyring = Keyring.load_or_create(folder / "keys" / "signing.key")
        self.client = GatewayClient(served["url"], keyring.mint("control"))
        stack.callback(self.client.close)
        self.client.wait_ready()
        for name in names:
            wait_for(lambda port=self.ports[name]: answers(f"http://127.0.0.1:{port}/health"))  # type: ignore[misc]

    def _own(self, *command: str, quiet: bool = False) -> Process:
        process = Process(*command, quiet=quiet)
        self._stack.callback(process.end)
        return process

    def _part(self, name: str, latency_s: float) -> Process:
        options = ["--latency-s", str(latency_s)] if name == "upstream" else ["--target", self.upstream_url]
        return self._own(str(PARTS), name, "--port", str(self.ports[name]), *options)

    def use(self, size: int) -> None:
        """Register the upstream that answers with so many prompt ids."""
        for model in self.client.models():
            self.client.delete_model(model["url"])
        self.client.register_model(f"{self.upstream_url}/{size}", version=1)

    def leases(self, count: int) -> list[Lease]:
        names = [f"r{time.time_ns()}-{i}" for i in range(count)]
        self.client.create_rollouts([Rollout(rollout_id=name, group_id="g") for name in names])
        return [self.client.claim(name, "benchmark") for name in names]

    def targets(self, path: str, size: int, count: int) -> list[dict[str, str]]:
        if path == "gateway":
            return [{"url": lease.base_url, "token": lease.agent_token} for lease in self.leases(count)]
        base = f"http://127.0.0.1:{self.ports['upstream' if path == 'direct' else path]}"
        middle = [f"/{size}/r{i}" if path == "plain" else f"/{size}" for i in range(count)]
        return [{"url": f"{base}{one}/v1"} for one in middle]


@contextmanager
def house(**options: Any) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())), **options)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("a process of the benchmark did not start")
        time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=1, trust_env=False)
        return True
    except httpx.TransportError:
        return False


def load(plan: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """What the agents saw, and the CPU seconds of the load generator."""
    before = os.times()
    command = [sys.executable, str(PARTS), "load"]
    done = subprocess.run(command, input=json.dumps(plan), text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit("the load generator failed; its words are above")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(done.stdout), cpu


@dataclasses.dataclass
class Total:
    """Rounds of one path in one setting, summed."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    p50_ms: float = float("inf")
    p99_ms: float = float("inf")

    def add(self, seen: dict[str, Any], cpu_s: float) -> None:
        self.calls += seen["calls"]
        self.wall_s += seen["wall_s"]
        self.cpu_s += cpu_s
        self.p50_ms, self.p99_ms = min(self.p50_ms, seen["p50_ms"]), min(self.p99_ms, seen["p99_ms"])

    @property
    def rate(self) -> float:
        return self.calls / self.wall_s

    @property
    def cpu_ms(self) -> float:
        return 1e3 * self.cpu_s / self.calls


def cost(seconds: float, rounds: int) -> Iterator[list[str]]:
    """Rows: setting, path, calls/s, added p50, added p99, CPU ms per call, calls per CPU second, ratios to plain."""
    with house() as h:
        for size in SIZES:
            h.use(size)
            for agents in AGENTS:
                totals: dict[str, Total] = defaultdict(Total)
                for number in range(rounds + 1):
                    for path in PATHS:
                        process = h.processes.get(path)
                        before = process.cpu_s() if process else 0.0
                        span = seconds if number else 0.5  # the first round warms up and does not count
                        seen, _ = load({"prompt_ids": size, "seconds": span, "targets": h.targets(path, size, agents)})
                        if number:
                            totals[path].add(seen, process.cpu_s() - before if process else 0.0)
                yield from (cost_row(f"{size:,} ids, {agents} agents", totals, path) for path in PATHS)
        yield [f"memory of the plain proxy {h.processes['plain'].rss_mb():.0f} MB, of the gateway "
               f"{h.processes['gateway'].rss_mb():.0f} MB"]  # fmt: skip


def cost_row(setting: str, totals: dict[str, Total], path: str) -> list[str]:
    one, direct, plain = totals[path], totals["direct"], totals["plain"]
    row = [setting, PATHS[path], f"{one.rate:.0f}"]
    if path == "direct":
        return [*row, f"({one.p50_ms:.1f})", f"({one.p99_ms:.1f})", "", "", "", ""]
    row += [f"{one.p50_ms - direct.p50_ms:.1f}", f"{one.p99_ms - direct.p99_ms:.1f}"]
    row += [f"{one.cpu_ms:.2f}", f"{1e3 / one.cpu_ms:.0f}"]
    return [*row, f"{one.rate / plain.rate:.1f} x", f"{plain.cpu_ms / one.cpu_ms:.1f} x"]


def many(latency_s: float) -> Iterator[list[str]]:
    """400 agents at once on a server that takes 5 s, without the gateway and with it."""
    with house(latency_s=latency_s, others=False) as h:
        h.use(3_000)
        direct, _ = load({"prompt_ids": 3_000, "calls": 2, "targets": h.targets("direct", 3_000, 400)})
        peak, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                peak[0] = max(peak[0], h.client.state()["in_flight"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        seen, _ = load({"prompt_ids": 3_000, "calls": 2, "targets": h.targets("gateway", 3_000, 400)})
        done.set()
        watcher.join()
        yield [f"400 agents, {latency_s:g} s upstream: in flight at once", str(peak[0]), "400"]
        yield ["p50 through the gateway / direct", f"{seen['p50_ms'] / direct['p50_ms']:.3f}", "at most 1.1"]


def pause(held: int) -> Iterator[list[str]]:
    """Calls that arrive during a pause are all answered after it."""
    with house(others=False) as h:
        h.use(3_000)
        targets = h.targets("gateway", 3_000, held)
        h.client.pause()
        found: list[dict[str, Any]] = []
        plan = {"prompt_ids": 3_000, "calls": 1, "targets": targets}
        thread = threading.Thread(target=lambda: found.append(load(plan)[0]))
        thread.start()
        wait_for(lambda: h.client.state()["waiting"] == held, 60)
        resumed = time.perf_counter()
        h.client.resume()
        thread.join()
        took = time.perf_counter() - resumed
        yield [f"{held:,} calls held, answered after resume", f"{found[0]['calls']:,}", f"{held:,}"]
        yield ["the last of them after", f"{took:.1f} s", ""]


def memory(calls: int) -> Iterator[list[str]]:
    """Resident memory after a fifth and after all of the calls of 30,000 ids."""
    with house(others=False) as h:
        h.use(30_000)
        process = h.processes["gateway"]
        targets = h.targets("gateway", 30_000, 20)
        load({"prompt_ids": 30_000, "calls": calls // 100, "targets": targets})
        early = process.rss_mb()
        load({"prompt_ids": 30_000, "calls": calls // 20 - calls // 100, "targets": targets})
        late = process.rss_mb()
        yield [f"RSS after {calls // 5:,} and {calls:,} calls of 30,000 ids", f"{early:.0f} -> {late:.0f} MB", "flat"]


def disk(turns: int) -> Iterator[list[str]]:
    """A conversation that grows turn by turn: bytes of the store against the bytes of the raw exchange."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        h = House(stack, folder, others=False)
        port = free_port()
        engine = Process("-m", "swe_lightning.gateway.fakes", "--port", str(port))
        stack.callback(engine.end)
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"))
        h.client.register_model(f"http://127.0.0.1:{port}", version=1)
        lease, raw = h.leases(1)[0], 0
        before = stored_bytes(folder)
        messages = [{"role": "system", "content": "You repair code. " * 100}]
        http = stack.enter_context(httpx.Client(trust_env=False, timeout=60))
        headers = {"authorization": f"Bearer {lease.agent_token}"}
        for turn in range(turns):
            source = PARTS.read_text()[turn * 150 : turn * 150 + 800]
            messages.append({"role": "user", "content": f"<output of command {turn}>\n{source}"})
            body = {"model": "policy", "messages": messages, "return_token_ids": True, "logprobs": True}
            reply = http.post(f"{lease.base_url}/chat/completions", json=body, headers=headers)
            reply.raise_for_status()
            raw += len(orjson.dumps(body)) + len(reply.content)
            messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
        h.client.pause()
        kept = stored_bytes(folder) - before
        yield [f"{turns} growing turns: raw JSON / bytes stored", f"{raw / kept:.0f} x", "at least 20 x"]
        yield ["raw JSON, stored", f"{raw / 1e6:.1f} MB, {kept / 1e3:.0f} kB", ""]


def stored_bytes(folder: Path) -> int:
    """Bytes of the database once its log is folded in."""
    import sqlite3

    with sqlite3.connect(folder / "gateway.db") as db:
        db.execute("PRAGMA wal_checkpoint(FULL)")
        pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS)
    return int((pages - free) * size)


PRAGMAS = ("page_count", "freelist_count", "page_size")
COST = ["setting", "path", "calls/s", "added p50 ms", "added p99 ms", "CPU ms/call", "calls/CPU s", "calls/s vs plain",
        "calls/CPU s vs plain"]  # fmt: skip


def show(columns: list[str], rows: list[list[str]], markdown: bool) -> None:
    table, notes = [r for r in rows if len(r) == len(columns)], [r for r in rows if len(r) != len(columns)]
    if markdown:
        for line in (columns, ["---"] * len(columns), *table):
            print("| " + " | ".join(line) + " |")
    else:
        shown = Table(*columns)
        for row in table:
            shown.add_row(*row)
        Console(width=max(140, Console().width)).print(shown)
    for note in notes:
        print(*note)
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print tables as in docs/performance.md")
    parser.add_argument("--only", choices=["cost", "many", "pause", "memory", "disk"], action="append")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round of `cost`")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    cores, machine = os.cpu_count(), os.uname().machine
    print(f"{cores} cores ({machine}), Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} at the start\n")
    cases: dict[str, Callable[[], Iterator[list[str]]]] = {
        "many": lambda: many(5.0),
        "pause": lambda: pause(2_000),
        "memory": lambda: memory(5_000),
        "disk": lambda: disk(50),
    }
    wanted = options.only or ["cost", *cases]
    if "cost" in wanted:
        show(COST, list(cost(options.seconds, options.rounds)), options.markdown)
    rows = [row for name, case in cases.items() if name in wanted for row in case()]
    if rows:
        show(["what", "measured", "target"], rows, options.markdown)


if __name__ == "__main__":
    main()
