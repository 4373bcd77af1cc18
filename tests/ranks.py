"""Runs a function of a test module in the processes of one gloo group; what rank 0 finds comes back.

    python tests/ranks.py RANK RANKS STORE OUT MODULE ARGUMENT...

calls MODULE.in_group(*ARGUMENTS), which returns arrays by name.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np


def in_ranks(ranks: int, folder: Path, module: str, *arguments: str) -> dict[str, np.ndarray]:
    """`module.in_group(*arguments)` in `ranks` processes; AssertionError with the errors of the first that fails."""
    store, out = folder / f"store{ranks}", folder / f"found{ranks}.npz"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(store), str(out), module, *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in running:
            errors = process.communicate(timeout=280)[1]
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in running:
            process.kill()
    with np.load(out) as data:
        return dict(data)


def main(rank: int, ranks: int, store: str, out: str, module: str, *arguments: str) -> None:
    import torch.distributed as dist

    ours = ModuleType("tests")  # some installed package also calls itself `tests`
    ours.__path__ = [str(Path(__file__).parent)]
    sys.modules["tests"] = ours
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = importlib.import_module(module).in_group(*arguments)
    if rank == 0:
        np.savez(out, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
