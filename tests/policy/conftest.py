"""A small model directory with our tokenizer, and model servers as real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swe_lightning.policy.sync import ModelServer

Start = Callable[[str], ModelServer]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny policy whose weights are large enough that no two tokens are about equally likely."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from swe_lightning.policy.demos import bulk_texts
    from swe_lightning.policy.tiny import create_tiny

    path = tmp_path_factory.mktemp("tiny")
    create_tiny(path, texts=bulk_texts(400, 0), vocab=600, layers=2, hidden=64, heads=4, kv_heads=2, mlp=96)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def start_server() -> Iterator[Start]:
    """Run `code` (a call of serve or serve_scripted with port=PORT) in a process of its own until the session ends."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> ModelServer:
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = (
            "from pathlib import Path\n"
            "from swe_lightning.policy.server import serve\n"
            "from swe_lightning.policy.scripted import serve_scripted\n" + code.replace("PORT", str(port))
        )
        process = subprocess.Popen([sys.executable, "-c", program])
        running.append(process)
        server = ModelServer(f"http://127.0.0.1:{port}", timeout_s=60)
        server.wait_healthy(120)
        return server

    yield start
    for process in running:
        process.terminate()
    for process in running:
        process.wait(timeout=20)
