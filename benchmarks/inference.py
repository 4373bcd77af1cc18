"""How fast the embedded server answers a training step's calls, HTTP included.

    python benchmarks/inference.py MODEL_DIR [--groups 16 --group-size 8 --threads 1]

Plays groups of rollouts against the stand-in shell at temperature 1, the way a training step does: rollouts of a group
share their first prompt, later prompts extend earlier ones. The client is a second process and speaks plain HTTP/1.1
over keep-alive connections. Prints calls/s and sampled tokens/s, by the clock and by the server's CPU time (the number
to compare on a busy machine). An untrained model is fine for timing if --fixed-tokens is given: its replies then have
that many tokens and the episode is scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from swe_lightning.policy.demonstrator import Demonstrator, block, read
from swe_lightning.policy.standin import SYSTEM, Bug, Shell, answer, bugs


class Connection:
    """One keep-alive connection; requests one after another."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        data = orjson.dumps(body)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length"))
        reply: dict[str, Any] = orjson.loads(await reader.readexactly(length))
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(reply)
        return reply


async def rollout(port: int, bug: Bug, fixed: int, seed: int, counts: list[int]) -> None:
    connection, shell = Connection(port), Shell(bug)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": bug.issue}]
    for _ in range(8):
        body = {"messages": messages, "max_tokens": fixed or 48, "logprobs": True, "return_token_ids": True}
        reply = await connection.post("/v1/chat/completions", body | ({"ignore_eos": True} if fixed else {}))
        choice = reply["choices"][0]
        text = block(Demonstrator().command(read(messages), seed)) if fixed else choice["message"]["content"]
        counts[0] += 1
        counts[1] += len(choice["token_ids"])
        counts[2] += len(reply["prompt_token_ids"])
        messages = [*messages, {"role": "assistant", "content": text}]
        observation = answer(shell, text)
        if observation is None:
            return
        messages = [*messages, {"role": "user", "content": observation}]


async def drive(server: psutil.Process, port: int, groups: int, size: int, fixed: int, seed: int) -> str:
    source, counts = bugs(seed), [0, 0, 0]
    chosen = [next(source) for _ in range(groups)]
    started, before = time.perf_counter(), sum(server.cpu_times()[:2])
    await asyncio.gather(*(rollout(port, b, fixed, i, counts) for b in chosen for i in range(size)))
    seconds = time.perf_counter() - started
    cpu = sum(server.cpu_times()[:2]) - before
    calls, sampled, prompt = counts
    return (
        f"{groups}x{size} rollouts: {calls} calls, {sampled} sampled tokens, mean prompt {prompt / calls:.0f}, "
        f"{seconds:.2f} s: {calls / seconds:.0f} calls/s, {sampled / seconds:.0f} sampled tokens/s; "
        f"server CPU {cpu:.2f} s: {calls / cpu:.0f} calls/s, {sampled / cpu:.0f} tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fixed-tokens", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys; from pathlib import Path; from swe_lightning.policy.server import serve; "
        f"serve(model_dir=Path({str(options.model)!r}), host='127.0.0.1', port={port}, threads={options.threads})"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        from swe_lightning.policy.sync import ModelServer

        ModelServer(f"http://127.0.0.1:{port}").wait_healthy(120)
        process = psutil.Process(server.pid)
        for i in range(options.repeat):
            print(
                asyncio.run(drive(process, port, options.groups, options.group_size, options.fixed_tokens, i)),
                flush=True,
            )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
