"""What a model call costs on its way through the gateway.

    python benchmarks/gateway.py --agents 32 --calls 30 --prompt-chars 3000

Starts the token-id engine and the real gateway, lets agents talk in growing conversations, and prints one JSON line per
setting: calls per second, latency, and CPU of the gateway process per call; and the same agents without the gateway.
What it does not cover: an engine that takes time (see --latency-s), and several machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from swe_lightning.gateway.client import GatewayClient
from swe_lightning.gateway.tokens import Keyring
from swe_lightning.records import Rollout


async def agent(session: aiohttp.ClientSession, base: str, token: str, calls: int, chars: int) -> list[float]:
    """Seconds of each call of one conversation."""
    messages = [{"role": "system", "content": "x" * chars}]
    seconds = []
    for step in range(calls):
        messages.append({"role": "user", "content": f"output of step {step}: {'y' * 60}"})
        started = time.perf_counter()
        body = {"model": "any", "messages": messages}
        async with session.post(f"{base}/chat/completions", json=body, headers={"authorization": token}) as response:
            reply = await response.json()
            assert response.status == 200, reply
        seconds.append(time.perf_counter() - started)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return seconds


async def conversations(bases: list[tuple[str, str]], calls: int, chars: int) -> tuple[float, list[float]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        found = await asyncio.gather(*(agent(session, base, token, calls, chars) for base, token in bases))
        return time.perf_counter() - started, sorted(s for one in found for s in one)


def figures(name: str, wall: float, seconds: list[float], **more: Any) -> None:
    count = len(seconds)
    p50, p99 = seconds[count // 2], seconds[int(count * 0.99)]
    line = {"path": name, "calls": count, "calls_per_s": round(count / wall), "p50_ms": round(p50 * 1e3, 1)}
    print(json.dumps(line | {"p99_ms": round(p99 * 1e3, 1)} | more), flush=True)


def measure(run: Path, engine_url: str, options: argparse.Namespace) -> None:
    while not (run / "gateway.json").exists():
        time.sleep(0.05)
    served = json.loads((run / "gateway.json").read_text())
    keyring = Keyring.load_or_create(run / "keys" / "signing.key")
    with GatewayClient(served["url"], keyring.mint("control")) as client:
        client.wait_ready()
        client.register_model(engine_url, version=1)
        names = [f"r{i}" for i in range(options.agents)]
        client.create_rollouts([Rollout(rollout_id=name, group_id="g") for name in names])
        leases = [client.claim(name, "benchmark") for name in names]
        process = psutil.Process(served["pid"])
        before, commits = process.cpu_times(), client.state()["commits"]
        bases = [(lease.base_url, f"Bearer {lease.agent_token}") for lease in leases]
        wall, seconds = asyncio.run(conversations(bases, options.calls, options.prompt_chars))
        after = process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        figures(
            "gateway",
            wall,
            seconds,
            cpu_ms_per_call=round(1e3 * cpu / len(seconds), 2),
            commits=client.state()["commits"] - commits,
            rss_mb=process.memory_info().rss >> 20,
            disk_kb=sum(f.stat().st_size for f in run.glob("gateway.db*")) >> 10,
        )
    wall, seconds = asyncio.run(
        conversations([(f"{engine_url}/v1", "")] * options.agents, options.calls, options.prompt_chars)
    )
    figures("engine alone", wall, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--calls", type=int, default=30, help="calls per agent")
    parser.add_argument("--prompt-chars", type=int, default=400, help="first prompt; one character is one token")
    parser.add_argument("--latency-s", type=float, default=0.0, help="time the engine takes")
    parser.add_argument("--engine-port", type=int, default=19411)
    options = parser.parse_args()
    engine = [sys.executable, "-m", "swe_lightning.gateway.fakes", "--port", str(options.engine_port)]
    with tempfile.TemporaryDirectory() as folder:
        gateway = [sys.executable, "-m", "swe_lightning.gateway.server", "--run", folder, "--port", "0"]
        processes = [
            subprocess.Popen([*engine, "--latency-s", str(options.latency_s)]),
            subprocess.Popen(gateway, stderr=subprocess.DEVNULL),
        ]
        try:
            measure(Path(folder), f"http://127.0.0.1:{options.engine_port}", options)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


if __name__ == "__main__":
    main()
