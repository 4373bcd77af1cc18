"""The processes of benchmarks/gateway.py besides the gateway itself; each runs alone, so that none measures another.

upstream  a model server with ids and log-probs whose answer is rendered once, so that it is never the bottleneck
bare      a pass-through proxy: bytes in, bytes out, nothing read (the least any proxy can cost in Python)
plain     FastAPI + httpx: parses, adds what training needs, re-serialises, keeps events in memory; what one
          would write in an afternoon, with keep-alive, httptools and uvloop like the others
load      agents in a closed loop over raw sockets; prints what they saw as one JSON object
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import defaultdict
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

RESPONSE_TOKENS = 150
CHARS_PER_TOKEN = 4


# ---- upstream -----------------------------------------------------------------------------------------------------


def rendered_reply(prompt_ids: int) -> bytes:
    """A chat reply in vLLM's layout with that many prompt ids."""
    sampled = [(i * 7919) % 150_000 for i in range(RESPONSE_TOKENS)]
    content = [{"token": " tok", "logprob": -0.25, "bytes": [32, 116, 111, 107], "top_logprobs": []} for _ in sampled]
    message = {"role": "assistant", "content": " tok" * RESPONSE_TOKENS, "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}
    choice |= {"token_ids": sampled, "logprobs": {"content": content}}
    usage = {"prompt_tokens": prompt_ids, "completion_tokens": RESPONSE_TOKENS}
    reply = {"id": "cmpl-1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    ids = [(i * 104_729) % 150_000 for i in range(prompt_ids)]
    return orjson.dumps(reply | {"usage": usage | {"total_tokens": prompt_ids + 150}, "prompt_token_ids": ids})


def upstream(latency_s: float) -> Any:
    """Prompt size by the first path segment: /3000/v1/chat/completions."""
    rendered: dict[str, bytes] = {}

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await lifespan(receive, send)
        while (await receive()).get("more_body"):
            pass
        if scope["path"].endswith("/health"):
            return await answer(send, b"{}")
        size = scope["path"].split("/")[1]
        if size not in rendered:
            rendered[size] = rendered_reply(int(size))
        if latency_s:
            await asyncio.sleep(latency_s)
        await answer(send, rendered[size])

    return application


# ---- the two other proxies ----------------------------------------------------------------------------------------


def bare(target: str) -> Any:
    import aiohttp

    session: list[aiohttp.ClientSession] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await lifespan(receive, send)
        if not session:
            session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        chunks = []
        while True:
            message = await receive()
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        async with session[0].post(target + scope["path"], data=b"".join(chunks), headers=headers) as response:
            await answer(send, await response.read(), response.status)

    return application


def plain(target: str) -> Any:
    app = FastAPI()
    limits = httpx.Limits(max_connections=4096, max_keepalive_connections=4096)
    client = httpx.AsyncClient(timeout=600, limits=limits, trust_env=False)
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @app.post("/{size}/{rollout_id}/v1/chat/completions")
    async def chat(size: str, rollout_id: str, request: Request) -> JSONResponse:
        started = time.time()
        body = await request.json()
        asked = {**body, "logprobs": True, "top_logprobs": 0, "return_token_ids": True, "stream": False}
        response = await client.post(f"{target}/{size}/v1/chat/completions", json=asked)
        reply = response.json()
        events[rollout_id].append({"request": body, "response": reply, "started": started, "ended": time.time()})
        shown = {k: v for k, v in reply.items() if k != "prompt_token_ids"}
        shown["choices"] = [
            {k: v for k, v in choice.items() if k not in ("token_ids", "logprobs")} for choice in reply["choices"]
        ]
        return JSONResponse(shown, status_code=response.status_code)

    return app


async def answer(send: Any, data: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def lifespan(receive: Any, send: Any) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


# ---- load ---------------------------------------------------------------------------------------------------------


def conversation(prompt_ids: int) -> tuple[bytes, bytes]:
    """The request body around the place where a call puts its number: a long conversation, and its last message."""
    turn = "x = compute(value)\n" * (500 * CHARS_PER_TOKEN // 19)
    messages = [{"role": "system", "content": "You repair code."}]
    for n in range(max(1, prompt_ids // 500)):
        messages.append({"role": "assistant" if n % 2 else "user", "content": f"turn {n}\n{turn}"})
    messages.append({"role": "user", "content": "step @@"})
    body = orjson.dumps({"model": "policy", "messages": messages, "max_tokens": 1024})
    before, _, after = body.partition(b"@@")
    return before, after


class Agent:
    """One keep-alive connection, one call at a time."""

    def __init__(self, target: dict[str, str]) -> None:
        parts = urlsplit(target["url"])
        self.host, self.port = parts.hostname or "", parts.port or 80
        token = f"authorization: Bearer {target['token']}\r\n" if target.get("token") else ""
        self.head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {self.host}\r\n"
            f"content-type: application/json\r\n{token}content-length: "
        ).encode()

    async def run(self, before: bytes, after: bytes, until: float, calls: int) -> list[tuple[float, float]]:
        """(start, seconds) of each call until `until` or so many calls."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**22)
        seen = []
        for n in range(calls):
            started = time.perf_counter()
            if started >= until:
                break
            number = str(n).encode()
            size = str(len(before) + len(number) + len(after)).encode()
            writer.writelines([self.head, size, b"\r\n\r\n", before, number, after])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            data = await reader.readexactly(length)
            if b" 200 " not in head[:16]:
                raise SystemExit(f"{head[:200]!r} {data[:500]!r}")
            seen.append((started, time.perf_counter() - started))
        writer.close()
        return seen


async def load(plan: dict[str, Any]) -> dict[str, Any]:
    before, after = conversation(plan["prompt_ids"])
    agents = [Agent(target) for target in plan["targets"]]
    started = time.perf_counter()
    until = started + plan.get("seconds", 3600)
    seen = await asyncio.gather(*(agent.run(before, after, until, plan.get("calls", 10**9)) for agent in agents))
    seconds = sorted(s for one in seen for _, s in one)
    wall = max(at + s for one in seen for at, s in one) - started
    return {
        "calls": len(seconds),
        "wall_s": wall,
        "p50_ms": 1e3 * seconds[len(seconds) // 2],
        "p99_ms": 1e3 * seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))],
        "max_ms": 1e3 * seconds[-1],
    }


def serve(application: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(application, port=port, access_log=False, log_level="warning", ws="none", backlog=4096)


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else max(soft, 8192), hard))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["upstream", "bare", "plain", "load"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--target", default="")
    parser.add_argument("--latency-s", type=float, default=0.0)
    options = parser.parse_args()
    if options.part == "load":
        try:
            import uvloop

            runner: Any = uvloop.run
        except ImportError:
            runner = asyncio.run
        print(json.dumps(runner(load(json.load(sys.stdin)))))
    elif options.part == "upstream":
        serve(upstream(options.latency_s), options.port)
    else:
        serve({"bare": bare, "plain": plain}[options.part](options.target), options.port)


if __name__ == "__main__":
    main()
